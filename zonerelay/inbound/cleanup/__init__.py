"""One message on its way into the store, as Postfix's cleanup(8): `submit` is the one call for all of it.

`submission` and `envelope` check sender and recipients, `intake` owns the content from DATA to the reply.

`own_headers` makes the fields that this relay adds, `deliveries` makes one delivery per recipient.

Code outside takes `submit`, and `own_headers` to explain a message.
"""
