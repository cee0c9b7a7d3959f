"""`/v1/`: everything that the control socket can do, as HTTP and JSON with bearer tokens.

`routes` serves the table of `verbs`, whose answers are the frames of `operations`; `openapi` describes
the same table. Failures are `problems`.
"""
