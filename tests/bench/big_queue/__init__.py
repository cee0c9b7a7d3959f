"""A million queued deliveries: what they cost in memory, time and other mail's speed."""
