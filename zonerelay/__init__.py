"""zonerelay: a standalone SMTP relay that never loses what it acknowledged."""

__version__ = "0.2.0.dev0"
