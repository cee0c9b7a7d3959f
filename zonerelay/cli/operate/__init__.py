"""Commands of the daily work: they ask the running relay, or its stores, and change its queue."""
