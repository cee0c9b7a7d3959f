"""The HTTP API for mail: its bodies, its refusals, and its description."""

import base64
import json
import random
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.event_log import EventLog, events_into
from zonerelay.admin.api.openapi import document
from zonerelay.admin.api.verbs import VERBS, ApiCall
from zonerelay.admin.problems import ApiError, decoded
from zonerelay.admin.requests import VISIT, RequestIdentity
from zonerelay.admin.submission import body as module
from zonerelay.admin.submission.batch import MAX_OUTPUT, MAX_TAGS, substituted
from zonerelay.admin.submission.body import JsonBody, StoredBase64
from zonerelay.admin.submission.drafts import Submission
from zonerelay.admin.submission.verbs import SUBMISSION, RawQuery, problem_of
from zonerelay.admin.submission.zonemta import submission_of
from zonerelay.config.credentials.identities import Token
from zonerelay.config.settings import Settings
from zonerelay.inbound.cleanup.submit import Acceptance, Pieces, Rejection, Submit, SubmitCall
from zonerelay.inbound.limits.quotas import ExhaustedQuota
from zonerelay.inbound.refusal import Reason, Refusal
from zonerelay.inbound.state import replies
from zonerelay.message.compose import Base64Error
from zonerelay.model.clock import ManualClock
from zonerelay.model.envelope import Mailbox, MessageId
from zonerelay.model.reply import Reply

TEXTS = ("", "short", 'quote " and \\ and \n', "ü€😀" * 30, "x" * 300, '\\"' * 200, "\u2028" * 90)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("escaped", [True, False])
def test_strings_are_whole(seed: int, escaped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONG", 100)
    monkeypatch.setattr(module, "WRITE", 64)
    chance = random.Random(seed)
    octets = chance.randbytes(1000)
    given = {f"{at}{text[:2]}": text for at, text in enumerate(chance.sample(TEXTS, len(TEXTS)))}
    document = json.dumps({**given, "file": base64.b64encode(octets).decode()}, ensure_ascii=escaped)
    if escaped:  # as PHP and .NET write base64
        document = document.replace("/", "\\/").replace("+", "\\u002B").replace("A", "A\\r\\n")
    data = document.encode()
    body = JsonBody(len(data), tmp_path)
    at = 0
    while at < len(data):
        size = chance.choice((1, 2, 3, 7, 50, 500))
        body.feed(data[at : at + size])
        at += size
        if body.full:
            body.flush()
    body.flush()
    found = json.loads(body.finish())
    for name, text in given.items():
        long = body.long(found[name.replace("A", "A\r\n") if escaped else name])
        assert (long.text("") if long else found[name]) == text
        assert (long is not None) == (len(json.dumps(text, ensure_ascii=escaped).encode()) - 2 > 100)
    file = body.long(found["file"])
    assert file is not None
    assert b"".join(StoredBase64(file, "file").pieces()) == octets
    body.close()


def test_limits_and_broken_bodies(tmp_path: Path) -> None:
    body = JsonBody(10, tmp_path)
    with pytest.raises(ApiError):
        body.feed(b"x" * 11)
    many = JsonBody(100_000_000, tmp_path)
    with pytest.raises(ApiError):
        many.feed(b"[" * 10_000_000)
    for data in (b'{"a": "x', b'{"a": "x\\', b'"' + b"x" * 100_000):
        open_ended = JsonBody(1_000_000, tmp_path)
        open_ended.feed(data)
        open_ended.flush()
        with pytest.raises(json.JSONDecodeError):
            json.loads(open_ended.finish())
        open_ended.close()
    wrong = JsonBody(1_000_000, tmp_path)
    wrong.feed(b'"' + b"?" * 70_000 + b'"')
    wrong.flush()
    long = wrong.long(json.loads(wrong.finish()))
    assert long is not None
    with pytest.raises(Base64Error):
        list(StoredBase64(long, "file").pieces())
    wrong.close()


# Batches


FIELDS = ("subject", "text", "html")
FILLER = "{{a}}" * (65_000 // 5)


def filled(fields: dict[str, Any], directory: Path = Path("/nonexistent")) -> dict[str, Any]:
    return substituted(fields, JsonBody(10**6, directory))


COSTLY: dict[str, dict[str, Any]] = {
    "seven fields": {
        **dict.fromkeys(FIELDS, FILLER),
        "headers": {f"X-{each}": FILLER for each in range(4)},
        "substitutions": {"a": "x"},
    },
    "one field": {"text": FILLER, "substitutions": {"a": ""}},
    "many headers": {
        "headers": {f"X-{each}": "{{a}}" * 10 for each in range(MAX_TAGS // 10 + 1)},
        "substitutions": {"a": "x"},
    },
    "sections": {"text": "{{#a}}x{{/a}}" * MAX_TAGS, "substitutions": {"a": True}},
    "unbalanced": {"text": "{{" * (MAX_TAGS + 1), "substitutions": {"a": 1}},
    "long values": {
        "text": "{{a}}" * 900,
        "html": "{{a}}" * 90,
        "substitutions": {"a": "<" * (MAX_OUTPUT // 5000)},
    },
    "a tag without an end": {"text": "{{" + " " * 10_000, "substitutions": {"a": 1}},
    "blanks": {"text": " " * 50_000 + "{{a}}", "substitutions": {"a": 1}},
    "unsupported delimiters": {"text": "{{=<% %>=}}" + "<%a%>" * 100, "substitutions": {"a": "x"}},
}


class Submitting:
    """The requests of a user, whose messages `submit` accepts."""

    def __init__(self, submit: Submit) -> None:
        self.log, clock, settings = EventLog(), ManualClock(), Settings()
        self._operators: Any = SimpleNamespace(
            settings=lambda: settings,
            rules=lambda: settings.listener[0],
            events=events_into(self.log, clock),
            clock=clock,
            submit=submit,
        )

    async def post(self, path: str, kind: str, data: bytes, parameters: Any = None) -> Any:
        """Return the answer of the verb."""
        pieces = [data]

        async def readany() -> bytes:
            return pieces.pop() if pieces else b""

        content = SimpleNamespace(
            is_eof=lambda: True, total_bytes=len(data), read_nowait=lambda: data, readany=readany
        )
        request: Any = SimpleNamespace(
            content=content, content_length=len(data), headers={"Content-Type": kind}
        )
        token = Token(name="app", scope="submit", sha256="", created=0.0, user="app")
        VISIT.set(RequestIdentity("127.0.0.1", secure=False, private=True))
        (verb,) = (each for each in SUBMISSION if (each.method, each.path) == ("POST", path))
        return await verb.run(ApiCall(self._operators, token, "app", request, {}, parameters, None))


async def test_a_message_of_a_batch_that_fails_unexpectedly_leaves_the_others_their_answers() -> None:
    async def submit(call: SubmitCall, pieces: Pieces) -> Acceptance:
        if call.envelope.recipients[0].address == "b@example.net":
            raise RuntimeError("a bug")
        return Acceptance(MessageId("0123456789abcdef"))

    user = Submitting(submit)
    messages = [{"from": "a@example.org", "to": f"{each}@example.net", "subject": "x"} for each in "abc"]
    data = json.dumps({"messages": messages}).encode()
    answers = await user.post("/v1/messages/batch", "application/json", data)
    assert [each.status for each in answers.messages] == [202, 500, 202]
    problem = answers.messages[1].problem
    assert (problem.code, "bug" in problem.detail) == ("unexpected", False)
    assert [each["error"] for each in user.log.named("trouble")] == ["RuntimeError: a bug"]


@pytest.mark.parametrize("body", ["", "\r\n", "\n", "\r\n\r\nhello\r\n"])
@pytest.mark.parametrize(
    "blind", ["Bcc: zoe@example.net", "Bcc:\r\n zoe@example.net", "bcc \r\n : zoe@example.net"]
)
async def test_a_blind_copy_is_sent_and_not_shown_wherever_its_field_ends(blind: str, body: str) -> None:
    taken: list[tuple[list[str], bytes]] = []

    async def submit(call: SubmitCall, pieces: Pieces) -> Acceptance:
        assert not isinstance(pieces, AsyncIterator)
        taken.append(([each.address for each in call.envelope.recipients], b"".join(pieces)))
        return Acceptance(MessageId("0123456789abcdef"))

    head = "From: a@example.org\r\nTo: b@example.net\r\nMessage-ID: <a@example.org>\r\n"
    data = f"{head}{blind}{body}".encode()
    await Submitting(submit).post("/v1/messages", "message/rfc822", data, RawQuery())
    rest = "\r\nhello\r\n" if "hello" in body else ""
    assert taken == [(["b@example.net", "zoe@example.net"], f"{head}{rest}".encode())]


@pytest.mark.parametrize("headers", ["X-A: b", 5, True])
def test_zonemtas_headers_are_an_object_or_a_list(headers: object) -> None:
    document = {"from": "a@example.org", "headers": headers, "messageId": "<a@example.org>"}
    with pytest.raises(ApiError) as refused:
        submission_of(document, JsonBody(10**6, Path("/nonexistent")))
    assert refused.value.body.errors[0].pointer == "/headers"


@pytest.mark.parametrize("rest", [b"", b"} x", b', "x": 1e400}'])
def test_a_wrong_member_of_what_is_not_json_is_the_clients_error(rest: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        decoded(b'{"from": 5' + rest, Submission, "the body")
    assert refused.value.body.code == "malformed"


def test_a_member_that_occurs_twice_is_found_among_many() -> None:
    """To find it among 20,000 took 2 s, and the square of that among more."""
    members = b",".join(b'"x%d": 1' % each for each in range(50_000))
    began = time.process_time()
    with pytest.raises(ApiError, match="the member x49999 appears twice") as caught:
        decoded(b'{"metadata": {%b, "x49999": 2}}' % members, dict[str, Any], "the body")
    assert [each.pointer for each in caught.value.body.errors] == ["/metadata/x49999"]
    assert time.process_time() - began < 2


@pytest.mark.parametrize("name", COSTLY)
def test_a_costly_template_is_refused_before_it_is_filled_in(name: str) -> None:
    """65 KB of {{a}} in seven fields, in 150 messages, held the event loop for 35 s."""
    began = time.process_time()
    for _ in range(150):
        with pytest.raises(ApiError) as caught:
            filled(COSTLY[name])
        assert caught.value.body.status == 422
    assert time.process_time() - began < 2


def test_templates_within_the_bound_are_filled_in() -> None:
    given = {"text": "{{a}}" * (MAX_TAGS - 1), "html": "{{a}}", "substitutions": {"a": "<&"}}
    found = filled(given)
    assert found == {"text": "<&" * (MAX_TAGS - 1), "html": "&lt;&amp;"}


# The description of the HTTP API has what generators of clients need


APPENDED = ("raw", "request", "requestopts", "response", "data", "error", "errors", "async", "withhttpinfo")
"""What generators append to the name of an operation."""


def described() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(document([*VERBS, *SUBMISSION]))
    return found


def parts(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from parts(each)


def test_names_of_operations_and_types_stay_different_with_what_generators_append() -> None:
    paths, schemas = described()["paths"], described()["components"]["schemas"]
    operations = [each["operationId"] for path in paths.values() for each in path.values()]
    names = [each.replace("_", "").lower() for each in (*operations, *schemas)]
    made = [f"{name}{word}" for name in names[: len(operations)] for word in APPENDED]
    assert len(set(names)) == len(names)
    assert not set(names) & set(made)


def test_a_value_fits_one_alternative() -> None:
    for part in parts(described()):
        assert "anyOf" not in part
        kinds = [each for each in part.get("oneOf", ()) if "$ref" not in each]
        simple = ["number" if each["type"] == "integer" else each["type"] for each in kinds]
        assert len({*simple} - {"array"}) == len([each for each in simple if each != "array"]), part


# The HTTP status that a refusal becomes


def quota(limit: str, seconds: float) -> Refusal:
    return ExhaustedQuota(limit, 10, seconds).refusal()


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
