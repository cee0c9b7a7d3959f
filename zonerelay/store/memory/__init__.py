"""The memory engine, for tests and throw-away use: plain dictionaries, and on request a shelf in a file.

`store.MemoryStore` is the reference that the other engines are compared with.
"""
