"""The sandbox: a relay and a mail receiver on loopback, for trying everything without DNS and without
risk.
"""

DIRECTORY = "zonerelay-sandbox-"
"""How the name of a sandbox's temporary directory begins; commands look for its control socket there."""
