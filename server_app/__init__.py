"""The top tier: merges the stations' models and evaluates on the unseen domain."""
