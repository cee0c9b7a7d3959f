"""The configuration file: the options that it may set, the settings read from it, the problems in it.

`settings` has the classes of all tables, `load` reads a file into them, `checks` compares tables with each
other, `describe` lists every option, `changes` says what a reload can take up, `hostname` the relay's own
name. `endpoints`, `units`, `wording` and `problems` are the values and texts that other packages use too.
`tables` and `options` are private to this package.
"""
