"""Renditions: what a zone changes in a message before it is sent. `rendering` is the face.

`stored_pieces` reads a stored body that is examined first, and makes DKIM signatures.

The worker, which wires them, takes both.
"""
