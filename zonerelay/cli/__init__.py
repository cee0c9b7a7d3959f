"""The `zonerelay` command: `arguments` defines its syntax, and `main` runs one command.

`operate` has the commands that query and change a queue, `setup` those that write and check files, and
`spool` those for a whole spool. `terminal` prints the output of all of them. `relay` finds the configuration
and the running relay.
"""
