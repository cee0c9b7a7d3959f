"""Delivers one batch: `courier` over SMTP, and `capturing` to the capture store.

`courier` goes from host to host, `batch_state` decides which recipients the next transaction names and
collects the outcomes, `transaction_io` moves the bytes, and `extensions` decides between DATA and BDAT.

Code outside imports `courier` and `capturing`.
"""
