"""Mail over HTTP: `POST /v1/messages` and what belongs to it.

`verbs` has the requests. `body` reads a body as it comes, `drafts` checks what a request says and makes
a message of it, which `verbs` submits; `refusals` has the problem of a refusal, `states` tells what became of
a message.
"""
