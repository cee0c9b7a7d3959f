"""Stores ordered keys as immutable objects in a directory or an S3 bucket."""
