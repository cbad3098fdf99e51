"""Deployment on real machines: certificates, gateways, and the processes of the three tiers."""
