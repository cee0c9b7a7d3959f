"""Relay and scriptable sink on loopback: try everything with no DNS and no risk."""

DIRECTORY = "zonerelay-sandbox-"
"""How the name of a sandbox's temporary directory begins; commands look for its control socket there."""
