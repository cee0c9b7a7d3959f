"""The queue on ordered keys: its store, and how it is opened in memory and in a directory."""
