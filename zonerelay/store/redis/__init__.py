"""The access to Redis and Valkey: connections, and limits that relays share.

The queue is in `store/keys/redis`. Importing the package imports no driver.
"""
