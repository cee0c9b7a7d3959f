"""The configuration file: its options, and how it is parsed, checked and converted to settings.

`settings` has the classes of all tables, `load` reads a file into them, and `checks` compares tables with
each other. `settings` also defines which changes a reload can apply, and the relay's own name. Other packages
also import `endpoints`, `units` and `problems`; `tables` and `options` are private to this package.
"""
