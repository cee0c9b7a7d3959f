"""Commands for daily operation: they query the running relay or its stores, and change its queue."""
