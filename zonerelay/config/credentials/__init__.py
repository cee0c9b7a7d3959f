"""Secrets and users: references to secrets, the credentials file for logins, tokens, and password hashes."""
