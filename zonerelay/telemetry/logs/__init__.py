"""The log: one line per event, redacted, and bounded against events that clients can cause without end."""
