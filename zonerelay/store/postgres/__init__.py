"""The PostgreSQL engine: connections, migrations of tables, keys, and limits that relays share.

Importing the package imports no driver.
"""
