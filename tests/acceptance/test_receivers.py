"""Four real servers as the next hop, each in front of a sink: TLS, SMTPUTF8, 8-bit, BDAT, reports.

What one of them does not offer is stated where it is expected, so that a version that does is noticed.
"""

import smtplib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.certificates import make
from tests.support.exim import EximSender
from tests.support.haraka import HarakaReceiver
from tests.support.opensmtpd import OpenSmtpd
from tests.support.ports import LOOPBACK
from tests.support.postfix import PostfixInstance, PostfixSettings, PostfixTools
from tests.support.process import RelayProcess
from tests.support.senders import Server, Tls
from tests.support.sink import Sink

SENDER = "app@example.org"


@dataclass(frozen=True)
class Kind:
    """`envid`: its reports have the client's. The rest: what it offers."""

    utf8: bool = True
    dsn: bool = True
    envid: bool = True


KINDS = {
    "postfix": Kind(),
    "exim": Kind(dsn=False),
    "opensmtpd": Kind(utf8=False, envid=False),
    "haraka": Kind(dsn=False),
}

OLD_POSTFIX = "postfix with old TLS"


def has_tls(kind: str) -> bool:
    """Debian 12's OpenSMTPD offers STARTTLS and breaks every handshake off, with OpenSSL 3."""
    return not (kind == "opensmtpd" and OpenSmtpd.breaks_handshakes())


@pytest.fixture(params=sorted(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextmanager
def receiver(kind: str, directory: Path, tools: PostfixTools, next_hop: int) -> Iterator[int]:
    """A server of the kind that passes on to a port; it offers STARTTLS if it can be told to. The TLS of
    `OLD_POSTFIX` is older than any that a client of today speaks.
    """
    directory.mkdir(parents=True)
    certificate, key = make(LOOPBACK, "localhost", common_name=LOOPBACK).write(directory, "server")
    with ExitStack() as stack:
        if kind in ("postfix", OLD_POSTFIX):
            settings = PostfixSettings(
                next_hop=f"[{LOOPBACK}]:{next_hop}",
                certificate=certificate,
                key=key,
                protocols="TLSv1" if kind == OLD_POSTFIX else "",
            )
            yield stack.enter_context(PostfixInstance(tools, directory / "p", settings)).smtp_port
            return
        server = Server(port=next_hop, tls=Tls.NONE)
        if kind == "exim":
            yield stack.enter_context(EximSender(directory / "exim").receiving(server))
            return
        made = OpenSmtpd if kind == "opensmtpd" else HarakaReceiver
        own = made(directory / kind, certificate=certificate, key=key)
        yield stack.enter_context(own.receiving(server))


@contextmanager
def chain(
    kind: str, directory: Path, sink: Sink, tools: PostfixTools, *, tls: str = "opportunistic"
) -> Iterator[RelayProcess]:
    """Us, the server, the sink."""
    with (
        receiver(kind, directory / "r", tools, sink.port) as port,
        RelayProcess(
            directory / "relay",
            next_hop=f"{LOOPBACK}:{port}",
            zone={"tls": tls, "chunking": True, "max_connections": 2},
            tables={"bounce": {"enabled": True}},
        ) as relay,
    ):
        yield relay


def body_of(message: bytes) -> bytes:
    return message.partition(b"\r\n\r\n")[2]


def test_mail_arrives_unchanged_over_the_best_there_is(
    kind: str, open_path: Path, sink: Sink, postfix_tools: PostfixTools
) -> None:
    text = b"Subject: dots\r\n\r\n.\r\n..two\r\nplain\r\n" + b"x" * 900 + b"\r\n"
    large = b"Subject: large\r\n\r\n" + b"0123456789abcdef\r\n" * 20_000
    eight_bit = (
        "Subject: x\r\nMIME-Version: 1.0\r\nContent-Type: text/plain; charset=utf-8\r\n"
        "Content-Transfer-Encoding: 8bit\r\n\r\nGrüße, 郵便\r\n"
    ).encode()
    with chain(kind, open_path, sink, postfix_tools) as relay:
        for message in (text, large):
            recipients = [f"r{number}@example.com" for number in range(3)]
            relay.send(*recipients, message=message)
        relay.send(recipients[0], message=eight_bit, mail=("BODY=8BITMIME",))
        relay.wait_until_empty()
        delivered = relay.events("delivered")
        arrived = sink.until(3, timeout=60)
    assert len(delivered) == 7
    assert {bool(each["tls"]) for each in delivered} == {has_tls(kind)}
    bodies = {body_of(each.body) for each in arrived}
    assert bodies == {body_of(text), body_of(large), body_of(eight_bit)}


def test_an_address_beyond_ascii_goes_where_it_can(
    kind: str, open_path: Path, sink: Sink, postfix_tools: PostfixTools
) -> None:
    recipient = "jörg@example.com"

    def submit_utf8(port: int) -> None:
        with smtplib.SMTP(LOOPBACK, port, timeout=20) as client:
            client.ehlo()
            assert client.sock is not None
            client.mail(SENDER, ["SMTPUTF8"])
            client.sock.sendall(f"RCPT TO:<{recipient}>\r\n".encode())  # smtplib's send() is for ASCII
            assert client.getreply()[0] == 250
            assert client.data(b"Subject: x\r\n\r\nhello\r\n")[0] == 250

    with chain(kind, open_path, sink, postfix_tools) as relay:
        # A receiver that has taken mail is believed at once that it lacks SMTPUTF8.
        relay.send("plain@example.com")
        relay.wait_until_empty()
        submit_utf8(relay.smtp_port)
        relay.wait_until_empty()
        _, *delivered = relay.events("delivered")
        bounced = relay.events("bounced")
        _, arrived = sink.until(2, timeout=60)
    if KINDS[kind].utf8:
        assert arrived.recipients == (recipient,)
        assert not bounced
    else:
        assert "5.6.7" in bounced[0]["reply"]
        assert len(delivered) == 1  # the report
        assert b"\r\nStatus: 5.6.7\r\n" in arrived.body


def test_reports_are_its_duty_where_it_knows_them_and_ours_elsewhere(
    kind: str, open_path: Path, sink: Sink, postfix_tools: PostfixTools
) -> None:
    with chain(kind, open_path, sink, postfix_tools) as relay:
        orcpt = "ORCPT=rfc822;Bee+2Bnews@old.example"
        relay.send("b@example.com", mail=("RET=HDRS", "ENVID=Q7"), wishes=("NOTIFY=SUCCESS,FAILURE", orcpt))
        arrived = sink.until(2, timeout=60)
        relay.wait_until_empty()
        ours = relay.events("dsn")
    (report,) = [each for each in arrived if not each.mail_from]
    assert report.recipients == (SENDER,)
    assert bool(ours) is not KINDS[kind].dsn
    assert (b"\nOriginal-Envelope-Id: Q7\r\n" in report.body) is KINDS[kind].envid
    assert (b"Bee+news@old.example" in report.body) is KINDS[kind].envid


def test_broken_tls_costs_no_mail_where_clear_text_is_allowed_and_leaks_none_where_it_is_not(
    open_path: Path, sink: Sink, postfix_tools: PostfixTools
) -> None:
    secret = b"Subject: x\r\n\r\nsecret\r\n"
    with chain(OLD_POSTFIX, open_path / "1", sink, postfix_tools, tls="required") as relay:
        relay.send("b@example.com", message=secret)
        relay.wait_for(lambda: bool(relay.events("deferred")), what="the deferral")
        (deferred,) = relay.events("deferred")
    assert "TLS" in deferred["reply"]
    assert not sink.messages
    with chain(OLD_POSTFIX, open_path / "2", sink, postfix_tools) as relay:
        relay.send("b@example.com", message=secret)
        relay.wait_until_empty()
        (delivered,) = relay.events("delivered")
        sink.until(1, timeout=60)
    assert not delivered["tls"]
