"""`/v1/`: everything that the control socket can do, as HTTP and JSON with bearer tokens.

`routes` serves the table of `verbs`, whose answers are the frames of `control/messages`; `openapi` describes
the same table. Failures are `problems`.
"""
