"""The operators' operations: one description of each, with its request and its answers.

`catalogue` lists them. What an operation does is in `control/`, how it looks is in `admin/` and `cli/`.
"""
