"""`/v1/`: all operations of the control socket as HTTP and JSON with bearer tokens.

`routes` serves the table in `verbs`, whose answers are the frames of the control operations; `openapi`
describes the same table. Failures are `problems`.
"""
