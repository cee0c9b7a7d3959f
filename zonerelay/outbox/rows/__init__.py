"""Processes outbox rows: `claims` claims, reads and writes them, `row` is one row, and `mailboxes` has the
mailboxes that they name.
"""
