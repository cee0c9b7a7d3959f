"""The `zonerelay` command: `arguments` is its grammar, `main` runs one command and returns its exit status.

`operate` has the commands that query and change a queue, `setup` those that write and check files, and
`spool` those for a whole spool. `terminal` prints the output of all of them. `relay` finds the configuration
and the running relay.
"""
