"""Deciding when: scheduling, destinations, retry, settling. Sends nothing itself."""
