"""Keeps a store usable: `health` holds its state and watches free space, and `reader_threads` runs blocking
reads. A further module manages the file that reserves space for a full disk.
"""
