"""Captured mail: messages that are kept to be looked at instead of being sent.

The faces are `store` (the messages), `parts` (one message, taken apart) and `open_capture` of `store`.
"""
