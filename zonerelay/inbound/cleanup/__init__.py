"""One message on its way into the store, as Postfix's cleanup(8): `intake` owns it from DATA to the reply.

`own_headers` makes the fields that this relay adds, `deliveries` makes one delivery per recipient.

Code outside takes `own_headers`, to explain a message.
"""
