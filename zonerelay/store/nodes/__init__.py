"""One queue on several nodes. Each node has its own partition, and adopts those that others have left."""
