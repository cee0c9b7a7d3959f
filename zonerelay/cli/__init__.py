"""The `zonerelay` command: `arguments` is its grammar, `main` runs one command and gives its exit status.

`operate` has the commands that ask and change a queue, `setup` those that make and check files; `terminal` is
how all of them print, and `relay` finds the configuration and the relay that runs with it.
"""
