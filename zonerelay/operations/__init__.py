"""The operations that operators can request, each defined once with its request and response types.

`catalogue` lists the operations. `control/` implements them; `admin/` and `cli/` present them.
"""
