"""zonerelay: a standalone SMTP relay that never loses a message it has acknowledged."""

__version__ = "0.2.0.dev0"
