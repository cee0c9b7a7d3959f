"""Secrets and users: references to secrets, the credentials file of those who log in, and their hashes."""
