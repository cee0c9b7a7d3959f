"""`zonerelay spool`: verbs that look at a whole spool, and those that need its relay stopped."""
