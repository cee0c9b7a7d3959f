"""Relay and scriptable sink on loopback: try everything with no DNS and no risk."""
