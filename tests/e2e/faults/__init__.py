"""Faults of a deployment with real processes; all modules share one deployment."""
