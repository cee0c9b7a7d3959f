"""Speaking with PostgreSQL: connections, steps of table versions, and limits that relays share there.

The queue is in `store/keys/postgres`. Importing the package imports no driver.
"""
