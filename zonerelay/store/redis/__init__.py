"""Speaking with Redis and Valkey: connections, what a server promises, and limits that relays share there.

The queue is in `store/keys/redis`. Importing the package imports no driver.
"""
