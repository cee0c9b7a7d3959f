"""Several relays on one store, each in a network namespace of its own, under load and under faults."""
