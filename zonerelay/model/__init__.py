"""Immutable values of mail, named as in the RFCs: no I/O and no third-party libraries."""
