"""The base of the three tiers, the contracts of plug-ins, and the code that assembles the tiers."""

from hfedatm.moved import keep_old_names

__version__ = "0.1.0"

keep_old_names()
