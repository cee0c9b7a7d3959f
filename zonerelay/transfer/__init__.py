"""Exports, imports and migrates messages together with the state of their deliveries.

`export` writes a spool to files, `loader` stores the messages of a source, and `files` defines the file
format. `others` reads the queues of other systems. `migration` moves a queue from store to store, with a
`journal`. All transfers work through the contract of the stores.
"""
