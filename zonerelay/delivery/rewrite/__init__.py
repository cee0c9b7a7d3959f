"""Renditions: the changes that a zone makes to a message before it is sent. `rendering` is the entry point.

The worker, which creates the renderer, imports it.
"""
