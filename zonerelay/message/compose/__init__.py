"""Composes messages from text, HTML and files: `compose` is the entry point, `mime` encodes the parts.

Code outside takes `compose`, and `mime` for base64 alone.
"""
