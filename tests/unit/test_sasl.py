"""Passwords and user names of PLAIN and LOGIN; what clients get wrong is in the transcripts `auth_*`."""

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
    prepare_password,
    prepare_user,
)

APP = Credentials("app", "correct horse")


def b64(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def talk(mechanism: str, *responses: str | None) -> list[Reply | Credentials]:
    exchange = SaslExchange(mechanism)
    return [exchange.respond(response) for response in responses]


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
