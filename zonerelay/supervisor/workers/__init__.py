"""The processes of the workers: start, channel, restart policy, and their replacement one after the other."""
