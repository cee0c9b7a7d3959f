"""What keeps a store usable: `health` says whether it is, `recovery` repeats a repair until it succeeds.

`local_keeper` is the base of the keepers on this machine's own disks, and `ballast` the room that they keep
back for a full disk.
"""
