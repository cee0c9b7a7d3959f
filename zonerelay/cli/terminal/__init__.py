"""Terminal input and output of commands: tables, JSON, formatted text, progress bars, passwords and exit
statuses.
"""
