"""The rows that this relay processes: `row` is one row, `claims` claims, reads and writes rows, and
`mailboxes` has the mailboxes that they name.
"""
