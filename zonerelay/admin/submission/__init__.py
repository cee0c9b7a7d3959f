"""Mail submission over HTTP: `POST /v1/messages` and the requests about submitted messages.

`verbs` has the requests. `body` reads a request body as it arrives. `drafts` validates it and composes a
message, which `verbs` submits. `refusals` has the problem for a refusal, and `states` reports the state of a
message.
"""
