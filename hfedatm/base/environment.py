"""Environment variables by which a deployed process is told what it is."""

PRELOAD = "HFEDATM_PRELOAD"
"""Of a deployed node: the modules that its work needs."""
