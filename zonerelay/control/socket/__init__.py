"""The control socket: its file, the relay's end (asynchronous) and the command line's end (synchronous)."""
