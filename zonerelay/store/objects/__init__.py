"""Ordered keys in objects that are never changed: a directory, or a bucket of S3."""
