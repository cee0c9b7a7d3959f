"""Writes changes to a store. `group_commit` groups and writes them.

`batches` splits an operator's change of many deliveries into writes of a bounded size.
"""
