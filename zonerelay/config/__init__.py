"""The configuration file: the options that it may set, the settings read from it, the problems in it.

`settings` has the classes of all tables, `load` reads a file into them, `checks` compares tables with each
other. `settings` also says what a reload can take up, and what the relay's own name is. Other packages use
`endpoints`, `units` and `problems` too; `tables` and `options` are private to this package.
"""
