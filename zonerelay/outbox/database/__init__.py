"""The outbox's tables: their columns, their migrations, the statements over them, sealed passwords."""
