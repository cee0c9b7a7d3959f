"""The outbox: sends mail that applications insert into a table of their own PostgreSQL database.

A worker uses `attach.Outbox`. `joined` combines the spool and the table into one queue.
"""
