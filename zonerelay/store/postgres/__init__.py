"""The access to PostgreSQL: connections, migrations of tables, and limits that relays share.

The queue is in `store/keys/postgres`. Importing the package imports no driver.
"""
