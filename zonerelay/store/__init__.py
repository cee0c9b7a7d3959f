"""Stores accepted mail from the commit until its final outcome is stored.

Other packages import five modules. `contract` defines what every engine promises, `open` opens the engine
that the settings name, `context` defines what that engine is given, `spool_paths` locates the spool of
each worker, and `offline` carries out operators' commands without a relay. Each engine has a sub-package and
imports no other engine. `common` holds what several engines share.
"""
