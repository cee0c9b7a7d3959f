"""The HTTP status that a refusal becomes."""

from __future__ import annotations

import pytest

from zonerelay.admin.submission.verbs import problem_of
from zonerelay.inbound.cleanup.submit import Rejection
from zonerelay.inbound.limits.quotas import ExhaustedQuota
from zonerelay.inbound.refusal import Reason, Refusal
from zonerelay.inbound.state import replies
from zonerelay.model.address import Mailbox
from zonerelay.model.reply import Reply


def quota(limit: str, seconds: float) -> Refusal:
    return Refusal(Reason.QUOTA, ExhaustedQuota(limit, 10, seconds).reply(), seconds, limit)


@pytest.mark.parametrize(
    ("refusal", "status", "retry_after"),
    [
        (replies.BAD_KEY.refusal, 400, None),
        (replies.OTHER_CONTENT.refusal, 422, None),
        (replies.BEING_STORED.refusal, 409, None),
        (replies.STORE_FULL.refusal, 503, "10"),
        (replies.STORE_FAILURE.refusal, 503, "10"),
        (replies.SHUTTING_DOWN.refusal, 503, "10"),
        (replies.TOO_MUCH_MEMORY.refusal, 503, "10"),
        (replies.too_many_recipients(3).refusal, 422, None),
        (quota("messages_per_minute", 41.2), 429, "42"),
        (quota("octets_per_day", 7000.0), 429, "7000"),
        (replies.too_big(50_000_000).refusal, 413, None),
        (replies.AUTH_FAILED.refusal, 403, None),
        (Refusal(Reason.USER, Reply(550, "7.13", "This user is disabled")), 403, None),
        (Refusal(Reason.USER, Reply(552, "3.4", "Larger than the limit of this user")), 413, None),
        (Refusal(Reason.POLICY, Reply(550, "1.1", "No such user")), 422, None),
    ],
    ids=lambda value: value.reply.text if isinstance(value, Refusal) else str(value),
)
def test_a_refusal_becomes_the_status_that_says_when_to_come_back(
    refusal: Refusal, status: int, retry_after: str | None
) -> None:
    found = problem_of(Rejection(refusal.reason, refusal.reply, refusal.retry_after), {})
    assert found.body.status == status
    assert found.response().headers.get("Retry-After") == retry_after
    assert found.body.smtp_reply == str(refusal.reply)


def test_the_fields_to_blame_are_pointed_at() -> None:
    one, two = Mailbox("a@example.net"), Mailbox("b@example.net")
    refusal = Refusal(Reason.ACCESS, Reply(550, "7.1", "Not to there"))
    refused = Rejection(refusal.reason, refusal.reply, recipients={two: refusal})
    (error,) = problem_of(refused, {one: "/to/0", two: "/to/1"}).body.errors
    assert (error.pointer, error.detail) == ("/to/1", "550 5.7.1 Not to there")
    later = Rejection(Reason.SUSPENDED, Reply(421, "3.2", "Later"), of_sender=True)
    assert not problem_of(later, {}).body.errors
    never = Rejection(Reason.SENDER, Reply(553, "7.1", "Not yours"), of_sender=True)
    assert [each.pointer for each in problem_of(never, {}).body.errors] == ["/from"]
