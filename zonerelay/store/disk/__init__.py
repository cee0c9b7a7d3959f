"""The disk queue: for each message a file, and a file for its deliveries, readable without the relay.

`store.open_disk` opens a queue. The engine owns the directories, the order of their writes and the index in
memory that says which delivery is due. To read a queue's files, open `directories` and use `stock` and
`files`; `format` says what is in them.
"""
