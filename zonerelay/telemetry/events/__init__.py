"""The mail events: each function writes one log line and increments counters."""
