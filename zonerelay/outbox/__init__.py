"""The outbox: sends mail that applications insert into tables of their own PostgreSQL database.

A worker uses `store`, which combines the spool and the table into one queue. `build_outbox` builds it.
"""
