"""Processes each message from its envelope to the store, like Postfix's cleanup(8). `submit` is the one
function for all of it.

`submission` checks sender and recipients. `intake` processes the content from DATA to the
reply: it adds this relay's own header fields, removes the fields that no message keeps (`drop_headers`, and
the field that names a zone), so that the policy, the routes and readers of the queue never see them, and
makes one delivery per recipient. The remaining fields are not changed in any byte.

Code outside inbound/ imports `submit`.
"""
