"""What the three tiers share: settings, plug-ins, records, runtimes, results, command line."""

__version__ = "0.1.0"
