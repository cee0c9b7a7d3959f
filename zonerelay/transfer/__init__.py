"""Messages with the state of their deliveries, on their way out of a spool and into one.

`export` writes a spool to files, `loader` stores what a source yields, `files` is the format of the files.
`others` reads the queues of other systems. `migration` moves a queue from store to store, with a `journal`. A
transfer works through the contract of every store.
"""
