"""The HTTP status that a worker's reply becomes."""

from __future__ import annotations

import pytest

from zonerelay.admin.submission.transaction import Answered
from zonerelay.inbound.limits.quotas import Full
from zonerelay.inbound.state import replies
from zonerelay.model.reply import Reply


def of(reply: Reply) -> Answered:
    return Answered(reply.code, str(reply).partition(" ")[2])


@pytest.mark.parametrize(
    ("reply", "status", "retry_after"),
    [
        (replies.BEING_STORED.reply, 409, None),
        (replies.STORE_FULL.reply, 503, "10"),
        (replies.STORE_TROUBLE.reply, 503, "10"),
        (replies.SHUTTING_DOWN.reply, 503, "10"),
        (replies.TOO_MUCH_MEMORY.reply, 503, "10"),
        (Full("messages_per_minute", 10, 42.0).reply(), 429, "42"),
        (Full("octets_per_day", 10, 7000.0).reply(), 429, "7020"),
        (Reply(552, "3.4", "Message is larger than 50 MB, the limit of this listener"), 413, None),
        (Reply(535, "7.8", "Not valid"), 403, None),
        (Reply(550, "1.1", "No such user"), 422, None),
    ],
)
def test_a_reply_becomes_the_status_that_says_when_to_come_back(
    reply: Reply, status: int, retry_after: str | None
) -> None:
    found = of(reply).problem(())
    assert found.body.status == status
    assert found.response().headers.get("Retry-After") == retry_after
    assert found.body.smtp_reply == str(reply)
