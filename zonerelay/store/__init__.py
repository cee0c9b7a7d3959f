"""Accepted mail, from the commit until its outcome is stored.

`contract` is what every engine promises, `open` opens the engine that the settings name, `surroundings` is
what that engine is given, `spool_paths` says where the spool of each worker lies. Each engine has a
sub-package; `common` holds what several of them share.
"""
