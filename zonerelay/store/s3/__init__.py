"""The S3 store: a spool in one bucket, which several relays may share.

`open.open_s3` opens it. `reader` reads messages, bodies and the queue; `objects` reads and writes one
message, `records` encodes and decodes the objects, and `adopt` walks through the bucket. Importing the
package imports no driver.
"""
