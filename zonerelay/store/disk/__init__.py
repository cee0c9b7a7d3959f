"""The disk queue: for each message a file, and a file for its deliveries, readable without the relay.

`open.open_disk` opens it. Owns the directories, the order of their writes and the index in memory that says
which delivery is due.
"""
