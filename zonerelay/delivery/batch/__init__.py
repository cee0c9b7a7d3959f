"""One batch from the queue's call to its outcomes: `courier` is the face, `capturing` that of captured mail.

`courier` goes from host to host, `batch_state` decides which recipients the next transaction asks for,
`transaction_io` moves the bytes, `progress` keeps the outcomes, `chunking` decides between DATA and BDAT.

Code outside takes `courier` and `capturing`.
"""
