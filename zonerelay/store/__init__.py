"""Accepted mail, from the commit until its outcome is stored.

Other packages import five modules: `contract` is what every engine promises, `open` opens the engine that
the settings name, `surroundings` is what that engine is given, `spool_paths` says where the spool of each
worker lies, and `offline` does what operators' commands do without a relay. Each engine has a sub-package and
knows no other one; `common` holds what several of them share.
"""
