"""The mail events: each is one function that writes a log line and increments counters."""
