"""Robust rules choose and weigh the updates of a mean. Each is one file, found by its name."""
