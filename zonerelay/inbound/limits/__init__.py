"""How much clients may take: connections, memory, attempts, large bodies, bursts, guesses.

Nothing here does I/O; each module keeps its counts for one worker, and forgets them at a restart.

No module is for code outside inbound/.
"""
