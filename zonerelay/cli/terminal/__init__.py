"""Output and input of commands: tables and JSON, texts for people, progress bars, passwords, exit
statuses.
"""
