"""The metrics of one worker, and their totals over all workers of the relay."""
