"""What became of mail: the events of each message in SQLite, beside the spool, for `zonerelay log`.

`writer` takes the events of one worker, out of the way of mail; `reader` searches the files of all workers,
and says which time they do not cover; `database` is the format of a file. SQLite is loaded with the first
event, and with the first search.
"""
