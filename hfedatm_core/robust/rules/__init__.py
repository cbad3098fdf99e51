"""Robust rules: which updates enter a mean, and how much of each. One file each, found by name."""
