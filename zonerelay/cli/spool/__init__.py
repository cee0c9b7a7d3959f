"""`zonerelay spool`: verbs that work on a spool whose relay is stopped."""
