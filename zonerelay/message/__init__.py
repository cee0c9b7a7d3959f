"""Building and rewriting messages, streaming: no sockets, no store."""
