"""Processes outbox rows: `row` represents one row, `claims` claims, reads and writes rows, and `mailboxes`
manages the mailboxes that they name.
"""
