"""Logging in as a client: the RFCs' own examples, and servers that are wrong, hostile or never content."""

import base64
import hashlib
import hmac
import json
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fuzz.targets.logins import sasl as sasl_target
from zonerelay.model.reply import Reply
from zonerelay.smtp.client import sasl
from zonerelay.smtp.client.extensions import parse_ehlo
from zonerelay.smtp.client.sasl import SaslConversation, SaslError, SaslIdentity, without_secrets
from zonerelay.smtp.server import sasl as server_sasl
from zonerelay.smtp.server.paths import CommandError
from zonerelay.smtp.server.sasl import MAX_PASSWORD, MAX_USER, Credentials, SaslExchange, prepare_password

PENCIL = SaslIdentity("user", "pencil")

SHA_1 = (
    "SCRAM-SHA-1",
    "fyko+d2lbbFgONRv9qkxdawL",
    "n,,n=user,r=fyko+d2lbbFgONRv9qkxdawL",
    "r=fyko+d2lbbFgONRv9qkxdawL3rfcNHYJY1ZVvWVs7j,s=QSXCR+Q6sek8bf92,i=4096",
    "c=biws,r=fyko+d2lbbFgONRv9qkxdawL3rfcNHYJY1ZVvWVs7j,p=v0X8v3Bz2T0CJGbJQyF0X+HI4Ts=",
    "v=rmF9pqV8S7suAoZWja4dJRkFsKQ=",
)  # RFC 5802 5
SHA_256 = (
    "SCRAM-SHA-256",
    "rOprNGfwEbeRWgbNEkqO",
    "n,,n=user,r=rOprNGfwEbeRWgbNEkqO",
    "r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096",
    "c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,"
    "p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=",
    "v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=",
)  # RFC 7677 3


def b64(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def plain(line: bytes) -> str:
    return base64.b64decode(line).decode()


def talk(name: str, identity: SaslIdentity = PENCIL, nonce: str = "abc") -> SaslConversation:
    return SaslConversation(sasl.make_mechanism(name, identity, nonce))


def begun(name: str, identity: SaslIdentity = PENCIL, nonce: str = "abc") -> SaslConversation:
    talking = talk(name, identity, nonce)
    talking.begin()
    return talking


def half_way() -> SaslConversation:
    """The example's server has shown its salt, and the client its proof."""
    talking = begun(SHA_256[0], nonce=SHA_256[1])
    talking.receive(334, b64(SHA_256[3]))
    return talking


def check_end(talking: SaslConversation, challenge: str, words: str) -> None:
    """It cancels the exchange, and why is told when the server has answered that."""
    assert talking.receive(334, challenge) == b"*"
    with pytest.raises(SaslError, match=words):
        talking.receive(501, "cancelled")


@pytest.mark.parametrize("example", [SHA_1, SHA_256], ids=lambda example: example[0])
def test_scram_is_that_of_the_rfcs(example: tuple[str, ...]) -> None:
    name, nonce, client_first, server_first, client_final, server_final = example
    talking = talk(name, PENCIL, nonce)
    assert talking.begin() == f"AUTH {name} {b64(client_first)}".encode()
    assert plain(talking.receive(334, b64(server_first))) == client_final
    assert talking.receive(334, b64(server_final)) == b""
    assert not talking.done
    talking.receive(235, "2.7.0 welcome")
    assert talking.done


def test_a_server_that_does_not_know_the_password_is_not_believed() -> None:
    talking = half_way()
    forged = "v=" + b64(hmac.digest(b"guess", b"x", "sha256"))
    check_end(talking, b64(forged), "does not know the password")
    assert talking.done


def test_a_235_without_the_proof_is_worth_nothing() -> None:
    for talking in (begun("SCRAM-SHA-1"), half_way()):
        with pytest.raises(SaslError, match="did not prove"):
            talking.receive(235, "welcome")


@pytest.mark.parametrize(
    ("challenge", "words"),
    [
        ("r=abcX,s=QSXCR+Q6sek8bf92,i=1", "iterations"),
        (f"r=abcX,s=QSXCR+Q6sek8bf92,i={sasl.MIN_ITERATIONS - 1}", "iterations"),
        (f"r=abcX,s=QSXCR+Q6sek8bf92,i={sasl.MAX_ITERATIONS + 1}", "iterations"),
        ("r=abcX,s=QSXCR+Q6sek8bf92,i=99999999999999999999", "iteration count"),
        ("r=abcX,s=QSXCR+Q6sek8bf92,i=-4096", "iteration count"),
        ("r=abcX,s=QSXCR+Q6sek8bf92,i=４０９６", "iteration count"),
        ("r=abcX,s=QSXCR+Q6sek8bf92", "iteration count"),
        ("r=abc,s=QSXCR+Q6sek8bf92,i=4096", "nonce"),
        ("r=xyz,s=QSXCR+Q6sek8bf92,i=4096", "nonce"),
        ("s=QSXCR+Q6sek8bf92,i=4096", "nonce"),
        ("r=abcX,s=***,i=4096", "base64"),
        ("r=abcX,s=,i=4096", "salt"),
        ("m=x,r=abcX,s=QSXCR+Q6sek8bf92,i=4096", "extension"),
        ("e=unknown-user", "unknown-user"),
        ("hello", "not a SCRAM message"),
        (",", "not a SCRAM message"),
    ],
)
def test_a_first_message_that_is_wrong_or_hostile_ends_the_exchange(challenge: str, words: str) -> None:
    talking = begun("SCRAM-SHA-256")
    check_end(talking, b64(challenge), words)


def test_what_is_not_base64_ends_the_exchange() -> None:
    talking = begun("SCRAM-SHA-256")
    check_end(talking, "r=abcX", "invalid base64")


def test_scram_says_why_a_server_refused_in_its_last_message() -> None:
    talking = half_way()
    assert talking.receive(334, b64("e=invalid-proof")) == b""
    talking.receive(535, "no")
    assert talking.mechanism.explanation == "invalid-proof"


def test_scram_names_are_escaped_and_prepared() -> None:
    talking = talk("SCRAM-SHA-1", SaslIdentity("a=b,c\u2168\u00ad", "\u2168"))
    first = plain(talking.begin().split()[-1])
    assert first == "n,,n=a=3Db=2CcIX,r=abc"  # RFC 4013 3


def test_a_password_of_other_letters_is_hashed_in_its_prepared_form() -> None:
    """The same as by hand, with the compatibility form of the roman numeral nine."""
    talking = begun("SCRAM-SHA-1", SaslIdentity("user", "\u2168"))
    salt = b"salt"
    first = f"r=abcX,s={b64(salt)},i=4096"
    final = plain(talking.receive(334, b64(first)))
    key = hmac.digest(hashlib.pbkdf2_hmac("sha1", b"IX", salt, 4096), b"Client Key", "sha1")
    signed = f"n=user,r=abc,{first},c=biws,r=abcX".encode()
    signature = hmac.digest(hashlib.sha1(key).digest(), signed, "sha1")
    assert final.endswith(",p=" + b64(bytes(a ^ b for a, b in zip(key, signature, strict=True))))


@pytest.mark.parametrize("password", ["", "a\x07b", "\ue000"])
def test_scram_refuses_passwords_that_it_cannot_send(password: str) -> None:
    with pytest.raises(SaslError, match="the password"):
        talk("SCRAM-SHA-256", SaslIdentity("user", password))


def test_plain_is_one_line() -> None:
    talking = talk("PLAIN", SaslIdentity("tim", "tanstaaftanstaaf"))
    assert talking.begin() == b"AUTH PLAIN AHRpbQB0YW5zdGFhZnRhbnN0YWFm"  # RFC 4954 4.1
    talking.receive(235, "welcome")
    assert talking.done


def test_plain_cannot_send_a_nul() -> None:
    with pytest.raises(SaslError, match="NUL"):
        talk("PLAIN", SaslIdentity("tim", "a\0b"))


@pytest.mark.parametrize("challenge", ["", "UGFzc3dvcmQ6", "go on, please"])
def test_plain_says_it_again_once_to_a_server_that_asks_after_the_initial_response(challenge: str) -> None:
    talking = talk("PLAIN")
    line = talking.begin().split()[-1]
    assert talking.receive(334, challenge) == line  # golang/go#78749, curl/curl#18588
    check_end(talking, challenge, "another challenge")


def test_login_says_the_name_and_then_the_password_whatever_the_server_asks() -> None:
    talking = talk("LOGIN")
    assert talking.begin() == b"AUTH LOGIN"
    assert plain(talking.receive(334, "VXNlcm5hbWU6")) == "user"
    assert plain(talking.receive(334, b64("Secret, please"))) == "pencil"
    talking.receive(235, "")
    assert talking.done


@pytest.mark.parametrize("name", ["XOAUTH2", "SCRAM-SHA-256"])
def test_a_server_that_overlooks_the_initial_response_gets_it_again(name: str) -> None:
    talking = talk(name)
    line = talking.begin().split()[-1]
    assert talking.receive(334, "") == line


def test_xoauth2_is_googles_form() -> None:
    token = "ya29.vF9dft4qmTc2Nvb3RlckBhdHRhdmlzdGEuY29tCg"
    line = talk("XOAUTH2", SaslIdentity("someuser@example.com", token)).begin()
    assert line.startswith(b"AUTH XOAUTH2 ")
    assert plain(line.split()[-1]) == f"user=someuser@example.com\x01auth=Bearer {token}\x01\x01"


def test_a_refused_token_is_explained_and_the_exchange_is_ended_with_an_empty_line() -> None:
    talking = begun("XOAUTH2")
    challenge = json.dumps({"status": "401", "schemes": "bearer", "scope": "https://mail.google.com/"})
    assert talking.receive(334, b64(challenge)) == b""
    talking.receive(535, "5.7.8 no")
    assert talking.mechanism.explanation == (
        "the token was rejected: status 401, schemes bearer, scope https://mail.google.com/"
    )


NESTED = b"[" * 4000, b'{"a":' * 1500 + b"1" + b"}" * 1500


@pytest.mark.parametrize(
    "challenge", [b"not json", b"\xff\xfe", b"[]", b"{}", b"1" * 5000, *NESTED], ids=lambda text: text[:8]
)
def test_a_refusal_that_is_no_json_is_a_refusal(challenge: bytes) -> None:
    talking = begun("XOAUTH2")
    assert talking.receive(334, b64(challenge)) == b""
    assert talking.mechanism.explanation == "the token was rejected"


def test_a_long_token_waits_for_the_challenge() -> None:
    token = "t" * 4000
    talking = talk("XOAUTH2", SaslIdentity("user", token))
    assert talking.begin() == b"AUTH XOAUTH2"
    assert f"auth=Bearer {token}" in plain(talking.receive(334, ""))
    talking.receive(235, "")
    assert talking.done


def test_a_token_that_no_server_has_to_take_is_not_sent() -> None:
    talking = begun("XOAUTH2", SaslIdentity("user", "t" * sasl.MAX_LINE))
    check_end(talking, "", "exceed")


def test_a_challenge_that_our_code_cannot_take_ends_the_exchange_and_nothing_escapes() -> None:
    class Broken(sasl.SaslMechanism):
        name = "BROKEN"
        first = b"x"

        def respond(self, challenge: bytes) -> bytes:
            raise RecursionError

        def accepted(self) -> None:
            raise AssertionError

    talking = SaslConversation(Broken())
    talking.begin()
    check_end(talking, b64("x"), "RecursionError")


def test_a_server_that_never_stops_asking_is_left() -> None:
    talking = begun("LOGIN")
    talking.receive(334, "")
    talking.receive(334, "")
    assert talking.receive(334, "") == b"*"
    with pytest.raises(SaslError):
        talking.receive(334, "")
    assert talking.done
    assert sasl.MAX_CHALLENGES < 10


@pytest.mark.parametrize(
    ("wanted", "offered", "chosen"),
    [
        ("AUTO", "LOGIN PLAIN SCRAM-SHA-1 SCRAM-SHA-256", "SCRAM-SHA-256"),
        ("AUTO", "LOGIN PLAIN SCRAM-SHA-1", "SCRAM-SHA-1"),
        ("AUTO", "LOGIN PLAIN XOAUTH2", "PLAIN"),
        ("AUTO", "LOGIN", "LOGIN"),
        ("AUTO", "XOAUTH2 GSSAPI SCRAM-SHA-256-PLUS", None),
        ("PLAIN", "SCRAM-SHA-256 PLAIN", "PLAIN"),
        ("SCRAM-SHA-256", "PLAIN", None),
        ("XOAUTH2", "PLAIN XOAUTH2", "XOAUTH2"),
        ("AUTO", "", None),
    ],
)
def test_the_strongest_mechanism_offered_is_chosen(wanted: str, offered: str, chosen: str | None) -> None:
    capabilities = parse_ehlo(f"smarthost\nSIZE\nAUTH {offered}")
    assert sasl.choose_mechanism(wanted, capabilities.auth) == chosen


def test_mechanisms_are_read_as_old_servers_write_them() -> None:
    assert parse_ehlo("smarthost\nAUTH=LOGIN plain").auth == {"LOGIN", "PLAIN"}
    for text in (
        "AUTH PLAIN\nAUTH=LOGIN",
        "auth plain\nauth=login",
        "AUTH PLAIN\nAUTH LOGIN",
        "Auth=Plain\nAuth=Login",
        "AUTH LOGIN\nSIZE\nAUTH  PLAIN PLAIN",
        "AUTH\tPLAIN\tLOGIN",
        "AUTH PLAIN\nAUTH",
    ):
        assert parse_ehlo(f"smarthost\n{text}").auth == {"PLAIN", "LOGIN"} - (
            set() if "ogin" in text.lower() else {"LOGIN"}
        )
    assert parse_ehlo("AUTH.example.org\nSIZE").auth == frozenset()


def test_what_a_server_repeats_is_cleaned() -> None:
    identity = SaslIdentity("user", "pencil-case")
    for spelled in ("pencil-case", b64("pencil-case"), b64("\0user\0pencil-case")):
        assert without_secrets(f"bad: {spelled}!", identity) == "bad: [secret]!"
    begun = b64("user=user\x01auth=Bearer pencil-case\x01\x01")[:44]
    assert without_secrets(f"bad: {begun}", identity) == "bad: [secret]"
    assert (
        without_secrets("5.7.8 authentication unsuccessful", identity) == "5.7.8 authentication unsuccessful"
    )
    assert "pencil" not in repr(identity)


# Passwords and user names of PLAIN and LOGIN; what clients get wrong is in the transcripts `auth_*`


APP = Credentials("app", "correct horse")


def serve(mechanism: str, *responses: str | None) -> list[Reply | Credentials]:
    exchange = SaslExchange(mechanism)
    return [exchange.respond(response) for response in responses]


def test_the_longest_credentials_are_taken() -> None:
    longest = Credentials("u" * MAX_USER, "p" * MAX_PASSWORD)
    line = b64(f"{longest.user}\0{longest.user}\0{longest.password}")
    assert len(line) < server_sasl.MAX_AUTH_LINE
    assert serve("PLAIN", line) == [longest]


def test_the_same_word_from_different_keyboards_is_the_same_password() -> None:
    composed, decomposed = "pässwörd", "pa\u0308sswo\u0308rd"
    assert prepare_password(decomposed) == composed
    assert server_sasl.prepare_user(decomposed) == composed
    assert prepare_password("a\u00a0b\u3000c") == "a b c"
    assert prepare_password("A ﬁ ²") == "A ﬁ ²"  # NFKC, as SASLprep had it, would change these
    assert serve("PLAIN", b64(f"\0ü\0{decomposed}")) == [Credentials("ü", composed)]
    assert serve("LOGIN", b64("u\u0308"), b64(decomposed))[1:] == [Credentials("ü", composed)]


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
@example(mechanism="LOGIN", lines=["YQ==", "AGEAYg=="], asked=True)
def test_any_lines_end_in_a_challenge_or_an_answer(mechanism: str, lines: list[str], asked: bool) -> None:
    initial = "" if asked or not lines else f" {lines.pop(0)}"
    sasl_target("\n".join([mechanism + initial, *lines]).encode())


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
