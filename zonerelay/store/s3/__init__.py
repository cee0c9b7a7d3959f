"""The S3 store: a spool in one bucket, which several relays may share. `open.open_s3` opens it."""
