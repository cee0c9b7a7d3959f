"""The configuration file: what can be set, what is read from it, and what is wrong with it.

`settings` has the classes of all tables, `load` reads a file into them, `checks` says what must hold between
them, `describe` lists every option, `changes` what a reload can take up, `hostname` the relay's own name.
"""
