"""The parts that several engines share. No module here knows an engine; each raises StoreError alone.

`body`, `claims`, `keeper` and `write` are the four parts of an engine. `records` says how keys and values are
spelled, `counts` counts deliveries by state, `reading` reads many messages, and `private_directories` makes
files that no other user may read.
"""
