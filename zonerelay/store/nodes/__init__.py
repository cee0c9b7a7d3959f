"""One queue on several nodes: each has a partition of its own, and adopts those that others have left."""
