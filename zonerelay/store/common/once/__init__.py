"""Idempotency keys of stores on local disks. `reservations` decides whether a message may be stored,
`register` shares keys between workers.

A database server decides this in the write of the message and does not use this package.
"""
