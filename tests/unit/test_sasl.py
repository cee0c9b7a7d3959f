"""PLAIN and LOGIN as a client speaks them, and everything that it can get wrong."""

from __future__ import annotations

import base64
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zonerelay.model.reply import Reply
from zonerelay.smtp.server.paths import CommandError
from zonerelay.smtp.server.sasl import (
    MAX_AUTH_LINE,
    MAX_PASSWORD,
    MAX_USER,
    Credentials,
    SaslExchange,
    parse_auth,
    prepare_password,
    prepare_user,
)

ASK_USER = Reply(334, "", "VXNlcm5hbWU6")
ASK_PASSWORD = Reply(334, "", "UGFzc3dvcmQ6")
ASK_PLAIN = Reply(334, "", "")
APP = Credentials("app", "correct horse")


def b64(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def talk(mechanism: str, *responses: str | None) -> list[Reply | Credentials]:
    exchange = SaslExchange(mechanism)
    return [exchange.respond(response) for response in responses]


def refusal(mechanism: str, *responses: str | None) -> Reply:
    exchange = SaslExchange(mechanism)
    for response in responses[:-1]:
        assert isinstance(exchange.respond(response), Reply)
    with pytest.raises(CommandError) as caught:
        exchange.respond(responses[-1])
    return caught.value.reply


@pytest.mark.parametrize(
    ("argument", "parsed"),
    [
        ("PLAIN", ("PLAIN", None)),
        ("plain AGEAYg==", ("PLAIN", "AGEAYg==")),
        ("Login", ("LOGIN", None)),
        ("LOGIN =", ("LOGIN", "=")),
        ("PLAIN ", ("PLAIN", None)),
    ],
)
def test_a_mechanism_has_no_case_and_a_response_has(argument: str, parsed: tuple[str, str | None]) -> None:
    assert parse_auth(argument) == parsed


@pytest.mark.parametrize(
    ("argument", "code", "status"),
    [
        ("", 501, "5.5.4"),
        ("PLAIN a b", 501, "5.5.4"),
        ("PL\x00AIN", 501, "5.5.4"),
        ("X" * 21, 501, "5.5.4"),
        ("CRAM-MD5", 504, "5.5.4"),
        ("SCRAM-SHA-256", 504, "5.5.4"),
    ],
)
def test_what_is_no_mechanism_of_ours_is_refused(argument: str, code: int, status: str) -> None:
    with pytest.raises(CommandError) as caught:
        parse_auth(argument)
    assert (caught.value.reply.code, caught.value.reply.status) == (code, status)


def test_plain_in_one_line() -> None:
    assert talk("PLAIN", b64("\0app\0correct horse")) == [APP]


def test_plain_after_an_empty_challenge() -> None:
    assert talk("PLAIN", None, b64("\0app\0correct horse")) == [ASK_PLAIN, APP]
    assert ASK_PLAIN.encode() == b"334 \r\n"


def test_an_empty_initial_response_is_asked_for_again() -> None:
    assert talk("PLAIN", "=", b64("\0app\0correct horse")) == [ASK_PLAIN, APP]
    assert talk("LOGIN", "=", b64("app"), b64("correct horse")) == [ASK_USER, ASK_PASSWORD, APP]


def test_an_equals_sign_is_empty_only_as_the_initial_response() -> None:
    assert refusal("PLAIN", None, "=").status == "5.5.2"
    assert refusal("PLAIN", "=", "=").status == "5.5.2"


def test_plain_may_name_the_same_user_twice_and_no_other() -> None:
    assert talk("PLAIN", b64("app\0app\0correct horse")) == [APP]
    reply = refusal("PLAIN", b64("root\0app\0correct horse"))
    assert (reply.code, reply.status) == (535, "5.7.8")


def test_login_asks_for_user_and_password() -> None:
    assert talk("LOGIN", None, b64("app"), b64("correct horse")) == [ASK_USER, ASK_PASSWORD, APP]


def test_login_takes_the_user_as_initial_response() -> None:
    assert talk("LOGIN", b64("app"), b64("correct horse")) == [ASK_PASSWORD, APP]


@pytest.mark.parametrize("mechanism", ["PLAIN", "LOGIN"])
def test_a_star_gives_up_at_every_step(mechanism: str) -> None:
    steps: list[tuple[str | None, ...]] = [("*",), (None, "*")]
    if mechanism == "LOGIN":
        steps.append((None, b64("app"), "*"))
    for step in steps:
        reply = refusal(mechanism, *step)
        assert (reply.code, reply.status) == (501, "5.7.0")


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("AGFwcABwdw", "no padding"),
        ("AGFwcABwdw=", "half the padding"),
        ("AGFwcABwdw===", "too much of it"),
        ("AGFwcABwdx==", "bits left over"),
        ("AGFw\ncABwdw==", "a line end inside"),
        ("AGFw cABwdw==", "a space inside"),
        ("AGFwcABwd_==", "another alphabet"),
        ("AGFw==cABwdw", "padding inside"),
        ("=AGFwcABwdw=", "padding in front"),
        ("AGFwcABwdw==AAAA", "more behind the padding"),
        ("ÄGFwcABwdw==", "not ASCII"),
        ("**", "not a cancellation either"),
        (b64(b"\0app\0\xff\xfe"), "not UTF-8"),
        (b64("app"), "no NUL"),
        (b64("app\0pw"), "one NUL"),
        (b64("\0app\0p\0w"), "three of them"),
        ("", "nothing"),
    ],
)
def test_a_plain_response_that_is_not_one_is_a_syntax_error(response: str, reason: str) -> None:
    reply = refusal("PLAIN", None, response)
    assert (reply.code, reply.status) == (501, "5.5.2"), reason


def test_login_takes_no_nul() -> None:
    assert refusal("LOGIN", None, b64("a\0b")).status == "5.5.2"
    assert refusal("LOGIN", None, b64("app"), b64("p\0w")).status == "5.5.2"


@pytest.mark.parametrize(
    ("user", "password", "reason"),
    [
        ("", "pw", "no user"),
        ("app", "", "no password"),
        ("u" * (MAX_USER + 1), "pw", "a long user"),
        ("ü" * (MAX_USER // 2 + 1), "pw", "a user that is long in octets"),
        ("app", "p" * (MAX_PASSWORD + 1), "a long password"),
        ("app\r\nX-Evil: 1", "pw", "line ends in the user"),
        ("a\u202eb", "pw", "a user that turns writing around"),
    ],
)
def test_credentials_that_nobody_can_have_are_refused_like_wrong_ones(
    user: str, password: str, reason: str
) -> None:
    plain = refusal("PLAIN", b64(f"\0{user}\0{password}"))
    login = refusal("LOGIN", b64(user), b64(password))
    assert plain == login, reason
    assert (plain.code, plain.status) == (535, "5.7.8")


def test_the_longest_credentials_are_taken() -> None:
    longest = Credentials("u" * MAX_USER, "p" * MAX_PASSWORD)
    line = b64(f"{longest.user}\0{longest.user}\0{longest.password}")
    assert len(line) < MAX_AUTH_LINE
    assert talk("PLAIN", line) == [longest]


def test_the_same_word_from_different_keyboards_is_the_same_password() -> None:
    composed, decomposed = "pässwörd", "pa\u0308sswo\u0308rd"
    assert prepare_password(decomposed) == composed
    assert prepare_user(decomposed) == composed
    assert prepare_password("a\u00a0b\u3000c") == "a b c"
    assert prepare_password("A ﬁ ²") == "A ﬁ ²"  # NFKC, as SASLprep had it, would change these
    assert talk("PLAIN", b64(f"\0ü\0{decomposed}")) == [Credentials("ü", composed)]
    assert talk("LOGIN", b64("u\u0308"), b64(decomposed))[1:] == [Credentials("ü", composed)]


def test_a_password_is_not_shown_by_accident() -> None:
    assert "horse" not in f"{APP!r} {APP}"


def test_a_refusal_keeps_nothing_of_what_was_sent() -> None:
    for secret in (b64(b"\0app\0hunter2\xff"), "hunter2!"):
        exchange = SaslExchange("PLAIN")
        with pytest.raises(CommandError) as caught:
            exchange.respond(secret)
        assert caught.value.__context__ is None
        assert "hunter2" not in str(caught.value)


_LINES = st.one_of(
    st.text(max_size=60),
    st.text(alphabet="AGFwcdx0123+/=*", max_size=40),
    st.binary(max_size=60).map(b64),
    st.text(max_size=30).map(b64),
    st.sampled_from(["", "=", "*", "====", "AGEAYg=="]),
)


@given(mechanism=st.sampled_from(["PLAIN", "LOGIN"]), lines=st.lists(_LINES, max_size=4), asked=st.booleans())
def test_any_lines_end_in_a_challenge_a_refusal_or_possible_credentials(
    mechanism: str, lines: list[str], asked: bool
) -> None:
    exchange = SaslExchange(mechanism)
    for line in [None, *lines] if asked else lines:
        answer = answer_to(exchange, line)
        if isinstance(answer, Credentials):
            assert 0 < len(answer.user.encode()) <= MAX_USER
            assert 0 < len(answer.password.encode()) <= MAX_PASSWORD
            assert answer.user.isprintable()
            assert "\0" not in answer.password
            return
        assert answer.code in (334, 501, 535)
        if answer.code != 334:
            return


def answer_to(exchange: SaslExchange, line: str | None) -> Reply | Credentials:
    try:
        return exchange.respond(line)
    except CommandError as error:
        return error.reply


@given(st.text(alphabet="Aa0+/=\r\n -_", max_size=12))
def test_only_one_spelling_of_base64_is_read(text: str) -> None:
    """Whatever LOGIN accepts as a user is exactly what an encoder would have written."""
    exchange = SaslExchange("LOGIN")
    exchange.respond(None)
    try:
        exchange.respond(text)
    except CommandError:
        return
    assert re.fullmatch(r"[A-Za-z0-9+/]*={0,2}", text)
    assert base64.b64encode(base64.b64decode(text, validate=True)).decode() == text
