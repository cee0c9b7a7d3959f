"""The outbox's tables: their columns and versions, the statements over them, sealed passwords."""
