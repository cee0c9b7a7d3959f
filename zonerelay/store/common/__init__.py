"""The parts that several engines share. No module here depends on an engine, and each raises only StoreError.

`body`, `claims`, `keeper` and `write` are the four parts of an engine. `records` defines keys and values,
`counts` counts deliveries by state, `reading` reads many messages, and `private_directories` creates files
that no other user may read.
"""
