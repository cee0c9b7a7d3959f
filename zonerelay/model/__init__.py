"""Immutable value types for mail, named as in the RFCs, without I/O and third-party libraries."""
