"""Captured mail: messages that are stored for inspection instead of being sent.

The interfaces are `store` (the messages, with `open_capture`) and `parts` (the parts of one message).
"""
