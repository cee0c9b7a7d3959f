"""Mail that applications insert into a table of their own PostgreSQL database.

`attach.Outbox` is what a worker uses; `joined` makes one queue of the spool and the table.
"""
