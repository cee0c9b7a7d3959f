"""Serves the HTTP API below `/v1/`: every operation of the control socket, in JSON, with bearer tokens.

`routes` serves the table in `verbs`, whose answers are the frames of the control operations; `openapi`
describes the same table. Failures are `problems`.
"""
