"""Exports, imports and migrates messages together with the state of their deliveries.

`files` defines the unit of every transfer and the file format, and exports a spool; `loader` stores the
messages of a source. `others` reads the queues of other systems. `migration` moves a queue from store to
store, with a journal. All transfers work through the contract of the stores.
"""
