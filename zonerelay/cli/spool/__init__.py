"""`zonerelay spool`: commands that process the whole spool, most of them while the relay is stopped."""
