"""Limits for clients: connections, memory, failed logins, large bodies, bursts and address guessing.

The modules keep their counts for one worker and forget them at a restart; only the quotas of users are stored
and shared by all workers.

Code outside inbound/ imports no module of this package.
"""
