"""Grids: how a tier reaches its children in a simulation, in one process and in a deployment."""
