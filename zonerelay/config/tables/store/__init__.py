"""The tables of the queue and of the server that keeps it, and of the outbox that applications fill."""
