"""Frozen values in the field's own words. Standard library only; no I/O; nothing here awaits."""
