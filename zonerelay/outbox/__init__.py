"""The outbox: sends mail that applications insert into a table of their own PostgreSQL database.

A worker uses `store`, which combines the spool and the table into one queue. `build_outbox` builds it.
"""
