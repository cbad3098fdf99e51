"""The common base of all three tiers: settings, records, plug-ins, trust, handover."""
