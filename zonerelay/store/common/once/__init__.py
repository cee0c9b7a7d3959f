"""Idempotency keys of stores on this machine's own disks: `reservations` decides, `register` is for workers.

A server decides for itself in the write of the message, and does not use this.
"""
