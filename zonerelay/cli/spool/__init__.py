"""`zonerelay spool`: commands that read a whole spool, and those that require a stopped relay."""
