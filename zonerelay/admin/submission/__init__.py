"""Mail submission over HTTP: `POST /v1/messages` and the requests about submitted messages.

`verbs` has the requests, and the problem for a refusal. `body` reads a request body as it arrives. `drafts`
validates it and composes a message, which `verbs` submits. `states` reports the state of a message.
"""
