"""Grids through which a tier reaches its children: in a simulation, one process or a deployment."""
