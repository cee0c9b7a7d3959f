"""Makes messages from text, HTML and files: `compose` is the face, `mime` writes the parts.

Code outside takes `compose`, and `mime` for base64 alone.
"""
