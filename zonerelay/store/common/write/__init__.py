"""Writes changes to a store: `group_commit` groups and writes them."""
