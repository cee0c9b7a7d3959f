"""Mail over HTTP: `POST /v1/messages` and what belongs to it.

`verbs` has the requests. `body` reads a body as it comes, `drafts` checks what a request says and makes
a message of it, `transaction` hands the message to a worker, which takes it as from an SMTP client, and
`states` tells what became of it.
"""
