"""The outbox's tables: their columns and versions, the SQL statements that use them, and encrypted
passwords.
"""
