"""Keeps a store usable: `health` holds its state and repeats repairs, `disk_watch` watches free space,
`ballast` manages the file that reserves space for a full disk, and `reader_threads` runs blocking reads.
"""
