"""The log: one redacted line per event, with limits on events that clients can cause."""
