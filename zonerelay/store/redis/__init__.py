"""The engine of Redis and Valkey: connections, keys, and limits that relays share.

Importing the package imports no driver.
"""
