"""The mail history: stores the events of each message in SQLite, for `zonerelay log`.

`writer` stores the events of one worker without delaying mail. `reader` searches the files of all workers,
and reports the times that they do not cover. `database` defines the file format. SQLite is loaded with the
first event, and with the first search.
"""
