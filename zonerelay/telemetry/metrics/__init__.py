"""The metrics of one worker, and their sum over all workers of the relay."""
