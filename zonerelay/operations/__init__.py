"""The operators' operations: one description of each, with its request and its answers.

`catalogue` lists the operations. `control/` implements them; `admin/` and `cli/` present them.
"""
