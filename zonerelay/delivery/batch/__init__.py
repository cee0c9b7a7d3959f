"""Delivers batches of messages: `courier` over SMTP, and `capturing` to the capture store.

`courier` goes from host to host, `batch_state` decides which recipients the next transaction names, and
whether DATA or BDAT, collects the outcomes, and moves the bytes.

Code outside imports `courier` and `capturing`.
"""
