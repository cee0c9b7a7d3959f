"""The way of changes into a store: `group_commit` gathers and writes them.

`batches` cuts an operator's change of many deliveries into writes of a bounded size. `replies` takes in the
answers of a server.
"""
