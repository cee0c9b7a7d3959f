"""The worker processes: their start, channel, restart policy, and rolling replacement."""
