"""The parts that several engines share. No module here depends on an engine, and each raises only StoreError.

`body`, `keeper`, `once` and `write` are the parts of an engine. `records` defines keys and values, `ready`
keeps the mail that can be claimed, and `private_directories` creates files that no other user may read.
"""
