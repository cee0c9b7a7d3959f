"""Brings one message into the store, like Postfix's cleanup(8). `submit` is the one function for all of it.

`submission` and `envelope` check sender and recipients, and `intake` processes the content from DATA to the
reply and makes one delivery per recipient. `own_headers` adds this relay's own header fields.

Code outside inbound/ imports `submit`, and `own_headers` to explain a message.
"""
