"""The PostgreSQL store: a spool in one database, which several relays may share.

`open.open_postgres` opens it; `driver` and `session` serve the outbox and the limits, too. Importing the
package imports no driver.
"""
