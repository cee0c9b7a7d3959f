"""What the relay tells its operator: one event function per mail event, metrics, logs, redaction."""
