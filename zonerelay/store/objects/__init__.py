"""Ordered keys in immutable objects, in a directory or an S3 bucket."""
