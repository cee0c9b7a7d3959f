"""Commands for daily work: they query the running relay or its stores, and change its queue."""
