"""The log: one line per event, redacted, and bounded for what clients can cause without end."""
