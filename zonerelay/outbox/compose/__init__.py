"""Makes messages of rows: `drafts` checks the columns, `composer` keeps the finished messages."""
