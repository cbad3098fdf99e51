"""What all three tiers stand on: settings, records, plug-ins, trust, handover."""
