"""The PostgreSQL store: a spool in one database, which several relays may share.

`open.open_postgres` opens it, `open.access_of` says where the database is. `reader` reads messages, bodies
and the queue; `rows` decodes rows, `sql` holds the statements, and `schema.migrate` makes the tables.
`driver` and `session` serve the outbox and the limits, too. Importing the package imports no driver.
"""
