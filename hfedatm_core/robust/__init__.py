"""Limit the influence of one liar: bounds on an update's change, and rules to choose updates."""
