"""Maps a rejection of a message to an HTTP problem, by its reason, its enhanced status code, or its reply
class.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from zonerelay.admin.api.problems import Code, FieldError, Problem
from zonerelay.inbound.cleanup.submit import Refused
from zonerelay.inbound.refusal import Reason
from zonerelay.model.address import Mailbox

_BY_REASON: dict[Reason, tuple[int, Code]] = {
    Reason.AUTH: (403, "forbidden"),
    Reason.BEING_STORED: (409, "not_possible"),
    Reason.IDEMPOTENCY_KEY: (400, "malformed"),
    Reason.RECIPIENTS: (422, "refused"),
}
_BY_STATUS: dict[str, tuple[int, Code]] = {
    "5.3.4": (413, "too_large"),  # RFC 3463 3.4: message too big for system
    "5.7.13": (403, "forbidden"),  # RFC 5248: user account disabled
}
_RETRY_AFTER = {429: 60.0, 503: 10.0}


def problem_of(refused: Refused, pointers: Mapping[Mailbox, str]) -> Problem:
    """Return the problem with the fields that caused it. `pointers` has the fields of the recipients."""
    reply = refused.reply
    status, code = _status_of(refused)
    errors = [
        FieldError(pointer=pointers[each], detail=str(one.reply)) for each, one in refused.recipients.items()
    ]
    # A temporary refusal is not caused by a field.
    if refused.reason is Reason.SENDER or (refused.of_sender and reply.is_permanent):
        errors = [FieldError(pointer="/from", detail=str(reply))]
    fields = {}
    if status in _RETRY_AFTER:
        fields["Retry-After"] = str(math.ceil(refused.retry_after or _RETRY_AFTER[status]))
    detail = f"{reply.status} {reply.text}" if reply.detail else reply.text
    return Problem(status, code, detail, errors=errors, fields=fields, smtp_reply=str(reply))


def _status_of(refused: Refused) -> tuple[int, Code]:
    reply = refused.reply
    if refused.reason is Reason.QUOTA and reply.is_transient:
        return 429, "too_many"
    by_class: tuple[int, Code] = (503, "unavailable") if reply.is_transient else (422, "refused")
    return _BY_REASON.get(refused.reason) or _BY_STATUS.get(reply.status, by_class)
