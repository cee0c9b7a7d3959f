"""The worker: one process that is a complete relay. `build` creates and connects its parts; no other module
imports all of them.
"""
