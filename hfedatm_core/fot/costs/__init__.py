"""Costs, which measure how much two channels differ: one file each; ``base`` is the interface."""
