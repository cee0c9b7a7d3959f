"""Handlers and authenticators of aiosmtpd in a running relay, with smtplib in front and a sink behind."""

import asyncio
import smtplib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiosmtpd.smtp import LoginPassword

from tests.support import handlers
from tests.support.certificates import context_files, make
from tests.support.handlers import SEEN
from tests.support.relay import HOSTNAME, LOOPBACK, Running, relay_with, settings
from tests.support.sink import Sink
from tests.support.tls_client import trusting
from zonerelay.config import settings as tables
from zonerelay.config.settings import ListenerAuth, ListenerTls, UnsafeListener, ZoneSettings

MESSAGE = b"From: app@example.org\r\nSubject: news\r\n\r\nhello\r\n.dot\r\n"


@pytest.fixture(autouse=True)
def _nothing_seen() -> Iterator[None]:
    SEEN.clear()
    yield
    handlers.Hostile.released.set()


@asynccontextmanager
async def handled(
    directory: Path, policy: str = "", **listener: Any
) -> AsyncIterator[tuple[Running, Sink]]:  # Any: options of a listener, by name
    async with Sink() as sink:
        zone = ZoneSettings(next_hop=f"{LOOPBACK}:{sink.port}", allow_private_addresses=True)
        chosen = tables.ListenerSettings(
            address=f"{LOOPBACK}:0", policy=f"tests.support.handlers:{policy}" if policy else "", **listener
        )
        async with relay_with(settings(directory, zone=zone, listener=chosen)) as running:
            yield running, sink


async def said(running: Running, talk: Callable[[smtplib.SMTP], Any]) -> Any:  # Any: what `talk` returns
    def run() -> Any:
        with smtplib.SMTP(*running.address, local_hostname="client.test", timeout=20) as client:
            return talk(client)

    return await asyncio.to_thread(run)


def send(
    *recipients: str, sender: str = "app@example.org", message: bytes = MESSAGE, options: tuple[str, ...] = ()
) -> Callable[[smtplib.SMTP], tuple[int, bytes]]:
    def talk(client: smtplib.SMTP) -> tuple[int, bytes]:
        client.ehlo()
        found = client.mail(sender, options)
        for recipient in recipients:
            if found[0] == 250:
                found = client.rcpt(recipient)
        return client.data(message) if found[0] == 250 else found

    return talk


def failures(running: Running) -> list[tuple[str, str, str]]:
    return [
        (str(each["step"]), str(each["kind"]), str(each["detail"]))
        for each in running.log.named("policy-failed")
    ]


async def test_the_handler_of_the_manual(tmp_path: Path) -> None:
    async with handled(tmp_path, "FromTheManual") as (running, sink):
        assert await said(running, send("bart@elsewhere.test")) == (550, b"5.0.0 not relaying to that domain")
        code, text = await said(running, send("bart@example.com"))
        assert (code, text[:19]) == (250, b"2.0.0 OK queued as ")
        await running.until_empty()
    assert SEEN == [("app@example.org", ["bart@example.com"], MESSAGE)]
    assert [(each.mail_from, each.recipients) for each in sink.messages] == [
        ("app@example.org", ("bart@example.com",))
    ]
    assert sink.messages[0].body.endswith(MESSAGE)


async def test_every_hook_gets_what_aiosmtpd_gives(tmp_path: Path) -> None:
    def talk(client: smtplib.SMTP) -> list[tuple[int, bytes]]:
        client.helo()
        code, lines = client.ehlo()
        assert code == 250
        assert b"8BITMIME" in lines
        assert b"CHUNKING" not in lines
        answers = [
            client.docmd("NOOP"), client.docmd("NOOP", "later"), client.docmd("VRFY", "<ann@example.com>"),
            client.rset(),
        ]  # fmt: skip
        client.mail("", ["SMTPUTF8", "BODY=8BITMIME", "SIZE=99"])
        client.rcpt("ann@example.com")
        answers.append(client.data("Subject: ä\r\n\r\nö\r\n".encode()))
        return answers

    async with handled(tmp_path, "AllHooks") as (running, _):
        answers = await said(running, talk)
        await running.until(lambda: ("QUIT",) in SEEN, what="QUIT")
    assert [code for code, _ in answers] == [250, 450, 252, 250, 250]
    assert answers[1][1] == b"4.3.2 not now"
    assert answers[2][1] == b"2.1.5 it may be there"
    assert answers[4][1].startswith(b"2.0.0 OK queued as ")
    options = ["SIZE=99", "BODY=8BITMIME", "SMTPUTF8"]
    expected = [
        ("HELO", "client.test", False),
        ("EHLO", "client.test", True, False),
        ("NOOP", None),
        ("NOOP", "later"),
        ("VRFY", "ann@example.com"),
        ("RSET", None),
        ("MAIL", "<>", options, LOOPBACK, "client.test", True),
        ("RCPT", "ann@example.com", "<>", options),
        ("DATA", "<>", ["ann@example.com"], "Subject: ä\r\n\r\nö\r\n".encode()),
        ("QUIT",),
    ]
    assert expected == SEEN


async def test_ehlo_in_its_old_form(tmp_path: Path) -> None:
    async with handled(tmp_path, "OldEhlo") as (running, _):
        assert await said(running, lambda client: client.ehlo("bad.test")) == (550, b"5.7.1 not you")
        code, lines = await said(running, lambda client: client.ehlo("good.test"))
    assert (code, lines.split(b"\n")[:2]) == (250, [HOSTNAME.encode(), b"PIPELINING"])


@pytest.mark.parametrize(
    ("name", "cause"),
    [("xfast.test", "it changed or added a line"), ("none.test", "it did not return the list of")],
)
async def test_a_hook_announces_only_what_the_relay_offers(tmp_path: Path, name: str, cause: str) -> None:
    async with handled(tmp_path, "Inventive") as (running, _):
        assert (await said(running, lambda client: client.ehlo(name)))[0] == 451
        ((step, kind, detail),) = failures(running)
    assert (step, kind) == ("helo", "bad-decision")
    assert cause in detail


@pytest.mark.parametrize("name", ["Parsed", "ParsedLater"])
async def test_messages_of_the_handlers_module(tmp_path: Path, name: str) -> None:
    async with handled(tmp_path, name) as (running, sink):
        await running.send("app@example.org", ["ann@example.com"], MESSAGE)
        await running.until_empty()
    assert SEEN == [("news", "app@example.org", "ann@example.com")]
    assert len(sink.messages) == 1


async def test_debugging_prints_and_the_mail_is_relayed(tmp_path: Path) -> None:
    async with handled(tmp_path, "Printing") as (running, sink):
        await running.send("app@example.org", ["ann@example.com"], MESSAGE)
        await running.until_empty()
    assert "Subject: news\nX-Peer: ('127.0.0.1', " in handlers.Printing.out.getvalue()
    assert len(sink.messages) == 1


async def test_a_mailbox_and_a_proxy_are_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second = Sink()
    await second.start()
    monkeypatch.setattr(handlers, "copies", handlers.mailbox(tmp_path / "copies"), raising=False)
    monkeypatch.setattr(handlers, "proxy", handlers.Proxy(LOOPBACK, second.port), raising=False)
    for name, spool in (("copies", tmp_path / "one"), ("proxy", tmp_path / "two")):
        async with handled(spool, name) as (running, sink):
            await running.send("app@example.org", ["ann@example.com"], MESSAGE)
            await running.until_empty()
        assert len(sink.messages) == 1
    await second.close()
    (kept,) = (tmp_path / "copies" / "new").iterdir()
    assert b"X-RcptTo: ann@example.com" in kept.read_bytes()
    assert b"X-Peer: 127.0.0.1\r\n" in second.messages[0].body


async def test_a_gateway_changes_message_sender_and_recipients(tmp_path: Path) -> None:
    async with handled(tmp_path, "Gateway") as (running, sink):
        assert (await said(running, send("team@example.com", "eve@example.com")))[0] == 250
        await running.until_empty()
        refused = await said(running, send("eve@example.com", message=b"Subject: refuse me\r\n\r\nx\r\n"))
        accepted = running.log.named("accepted")
    assert refused == (554, b"5.7.1 content refused")
    assert len(accepted) == 1
    recipients = {address for each in sink.messages for address in each.recipients}
    assert recipients == {"ann@example.com", "bob@example.com", "eve@example.com", "archive@example.org"}
    assert {each.mail_from for each in sink.messages} == {"gateway@example.org"}
    body = sink.messages[0].body
    assert b"Subject: [EXTERNAL] news\r\n" in body
    assert body.endswith(b"hello\r\n.dot\r\n-- \r\nfooter\r\n.\r\n")
    assert b"\n" not in body.replace(b"\r\n", b"")


def bdat(client: smtplib.SMTP) -> tuple[int, bytes]:
    client.ehlo()
    client.mail("app@example.org")
    client.rcpt("bart@example.com")
    for piece, last in ((MESSAGE[:20], ""), (MESSAGE[20:], " LAST")):
        client.send(f"BDAT {len(piece)}{last}\r\n".encode() + piece)
        answer = client.getreply()
    return answer


async def test_chunks_are_one_message(tmp_path: Path) -> None:
    async with handled(tmp_path, "FromTheManual") as (running, sink):
        assert (await said(running, bdat))[0] == 250
        await running.until_empty()
    assert SEEN[0][2] == MESSAGE
    assert sink.messages[0].body.endswith(MESSAGE)


async def test_a_message_beyond_the_bound_is_refused_and_never_shown(tmp_path: Path) -> None:
    large = MESSAGE + b"x" * 70 + b"\r\n"
    large += (b"y" * 70 + b"\r\n") * 1000
    async with handled(tmp_path, "FromTheManual", policy_max_size=64 * 1024) as (running, _):
        assert b"SIZE 65536" in (await said(running, lambda client: client.ehlo()))[1]
        assert await said(running, send("bart@example.com", message=large)) == (
            552,
            b"5.3.4 Message exceeds 64 KB, the limit of this listener",
        )
        assert (await said(running, send("bart@example.com", options=("SIZE=70000",))))[0] == 552
        assert SEEN == []
        assert (await said(running, send("bart@example.com", message=large[:60_000] + b"\r\n")))[0] == 250
    assert len(SEEN) == 1


async def test_what_a_handler_makes_too_large_is_refused(tmp_path: Path) -> None:
    message = MESSAGE + (b"y" * 70 + b"\r\n") * 500
    async with handled(tmp_path, "Grower", policy_max_size=64 * 1024) as (running, sink):
        assert await said(running, send("ann@example.com", message=message)) == (
            552,
            b"5.3.4 Message exceeds 64 KB, the limit of this listener",
        )
        assert running.queued() == 0
        assert (await said(running, send("ann@example.com")))[0] == 250
        await running.until_empty()
        assert running.worker.listeners._shared.memory.used == 0
    assert sink.messages[0].body.endswith(MESSAGE * 3)


HOSTILE_RECIPIENTS = [
    ("forgets", "handle_RCPT: it accepted the recipient but did not append it to envelope.rcpt_tos"),
    ("hangs", "timed out after 0.3 s"),
    ("raises", "RuntimeError: no such luck at handlers.py"),
    ("exits", "SystemExit: 3 at handlers.py"),
    ("asks", "AttributeError: server.push is not available"),
    ("mangles", "it set an invalid address"),
    ("content", "it changed envelope.content"),
    ("number", "returned int instead of a reply"),
    ("nothing", "returned NoneType"),
    ("lines", "a reply is a line of ASCII"),
    ("ends", "a reply is a line of ASCII"),
    ("goes-on", "a reply is a line of ASCII"),
    ("greets", "a reply is a line of ASCII"),
    ("contradicts", "a reply is a line of ASCII"),
    ("words", "a reply is a line of ASCII"),
    ("umlaut", "a reply is a line of ASCII"),
    ("long", "at most 400 printable"),
]


async def test_a_hostile_hook_costs_its_client_a_451(tmp_path: Path) -> None:
    def talk(what: str, client: smtplib.SMTP) -> list[int]:
        client.ehlo()
        client.mail("app@example.org")
        wrong = client.rcpt(f"{what}@example.com")
        assert wrong == (451, b"4.3.0 Policy not available now"), what
        right = client.rcpt("ann@example.com")
        return [right[0], client.data(MESSAGE)[0]]

    async with handled(tmp_path, "Hostile", policy_timeout=0.3) as (running, sink):
        for what, cause in HOSTILE_RECIPIENTS:
            before = len(failures(running))
            assert await said(running, partial(talk, what)) == [250, 250], what
            logged = [detail for _, _, detail in failures(running)[before:]]
            assert any(cause in each for each in logged), logged
        await running.until_empty()
    assert {each.recipients for each in sink.messages} == {("ann@example.com",)}
    assert any(isinstance(each, RuntimeError) for each in SEEN)


async def test_refusals_in_bytes_and_goodbyes(tmp_path: Path) -> None:
    def talk(client: smtplib.SMTP) -> list[tuple[int, bytes]]:
        client.ehlo()
        client.mail("app@example.org")
        found = [client.rcpt("bytes@example.com"), client.rcpt("hangs-up@example.com")]
        with pytest.raises(smtplib.SMTPServerDisconnected):
            client.noop()
        return found

    async with handled(tmp_path, "Hostile") as (running, _):
        assert await said(running, talk) == [(450, b"4.7.1 later"), (421, b"4.3.2 good bye")]


HOSTILE_SENDERS = [
    ("unset", "it accepted the sender but left envelope.mail_from empty"),
    ("options", "it changed envelope.mail_options"),
    ("twisted", "it set an invalid address: 501"),
    ("injected", "it set an invalid address: 501"),
    ("empties", "it accepted the message but left envelope.rcpt_tos"),
    ("objects", "envelope.content is of type Message"),
    ("blocks", "timed out after 0.3 s"),
]


async def test_a_hostile_sender_or_message_is_a_451(tmp_path: Path) -> None:
    async with handled(tmp_path, "Hostile", policy_timeout=0.3) as (running, sink):
        for sender, cause in HOSTILE_SENDERS:
            handlers.Hostile.released.clear()
            before = len(failures(running))
            answer = await said(running, send("ann@example.com", sender=f"{sender}@example.org"))
            assert answer == (451, b"4.3.0 Policy not available now")
            logged = [detail for _, _, detail in failures(running)[before:]]
            assert any(cause in each for each in logged), logged
            handlers.Hostile.released.set()
            assert (await said(running, send("ann@example.com")))[0] == 250
        await running.until_empty()
    assert len(sink.messages) == len(HOSTILE_SENDERS)


async def test_a_handler_opens_no_relay(tmp_path: Path) -> None:
    """A client that may not relay is refused before a hook is asked."""
    async with handled(tmp_path, "Hostile", allow_networks=(), auth=ListenerAuth.OPTIONAL,
                       unsafe=(UnsafeListener.CLEARTEXT_AUTH,)) as (running, _):  # fmt: skip
        answer = await said(running, send("opens@example.com"))
        assert answer == (
            550,
            b"5.7.1 Relaying denied for 127.0.0.1: not authenticated, and not in an allowed network",
        )
        assert await said(running, lambda client: client.docmd("VRFY", "ann")) == (
            252, b"2.5.0 Cannot verify, but will accept message and attempt delivery",
        )  # fmt: skip


def logged_in(user: str, password: str, *recipients: str) -> Callable[[smtplib.SMTP], Any]:
    def talk(client: smtplib.SMTP) -> Any:
        client.ehlo()
        try:
            client.login(user, password)
        except smtplib.SMTPAuthenticationError as error:
            return error.smtp_code
        return send(*recipients)(client)[0]

    return talk


async def test_an_authenticator_lets_its_users_relay(tmp_path: Path) -> None:
    async with handled(
        tmp_path,
        "Knows",
        authenticator="tests.support.handlers:PasswordBook",
        auth=ListenerAuth.REQUIRED,
        unsafe=(UnsafeListener.CLEARTEXT_AUTH,),
    ) as (running, sink):
        assert await said(running, logged_in("ann", "secret", "bob@example.com")) == 250
        assert await said(running, logged_in("ann", "wrong", "bob@example.com")) == 535
        assert (await said(running, send("bob@example.com")))[0] == 530
        await running.until_empty()
        (accepted,) = running.log.named("accepted")
        assert running.log.named("login-failed")
    assert len(sink.messages) == 1
    assert SEEN[1] == (True, LoginPassword(b"ann", b"secret"), None)
    assert accepted["user"] == "ann"


@pytest.mark.parametrize(
    ("user", "cause"),
    [
        ("down", ""),
        ("raises", "KeyError: 'ldap'"),
        ("hangs", "timed out after 0.3 s"),
        ("true", "returned bool instead of an AuthResult"),
    ],
)
async def test_an_authenticator_in_trouble_is_a_454(tmp_path: Path, user: str, cause: str) -> None:
    async with handled(
        tmp_path,
        authenticator="tests.support.handlers:unreliable",
        auth=ListenerAuth.OPTIONAL,
        unsafe=(UnsafeListener.CLEARTEXT_AUTH,),
        policy_timeout=0.3,
    ) as (running, _):
        assert await said(running, logged_in(user, "x")) == 454
        found = failures(running)
    assert {step for step, _, _ in found} == ({"authenticator"} if cause else set())
    assert not cause or cause in found[0][2]


async def test_a_session_knows_its_tls(tmp_path: Path) -> None:
    def talk(client: smtplib.SMTP) -> int:
        client.ehlo()
        client.starttls(context=trusting())
        return send("ann@example.com")(client)[0]

    files, keys = context_files([make(HOSTNAME)], tmp_path)
    async with handled(tmp_path, "Knows", tls=ListenerTls.STARTTLS, certificate=files, key=keys) as (
        running,
        _,
    ):
        assert await said(running, talk) == 250
    assert SEEN[0][2]["version"].startswith("TLSv1.")
