"""Mail servers that send through us: Exim with BDAT, Postfix with TLS and AUTH."""

import random
import smtplib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.submission import NAME, Papers, Submission, submission
from tests.support.exim import EximSender
from tests.support.ports import LOOPBACK, wait_until
from tests.support.postfix import PostfixInstance, PostfixSettings, PostfixTools
from tests.support.senders import RECIPIENT, SENDER, Server, Tls
from tests.support.sink import Sink

HEADER = b"From: app@example.org\nSubject: hello\nMessage-ID: <1@example.org>\n\n"
MESSAGE = HEADER + b"hello\n"
OTHER = "c@example.com"


def every_octet() -> bytes:
    """Lines of every octet but NUL and line ends, and dots where they could be stuffing."""
    octets = bytes(each for each in range(1, 256) if each not in b"\r\n")
    chance = random.Random(7)
    lines = [bytes(chance.sample(octets, chance.randrange(120))) for _ in range(2000)]
    return b"\n".join([b".", b"..", b".x", b"", *lines, b"."]) + b"\n"


def without_tampering(message: bytes) -> bytes:
    return message.partition(b"\r\n\r\n")[2]


@pytest.fixture
def doors(open_path: Path, sink: Sink, papers: Papers, credentials: Path) -> Iterator[Submission]:
    # Both servers read the CA's file as users of their own.
    papers.ca.parent.chmod(0o755)
    for folder in papers.ca.parent.parents:
        if folder != Path("/") and folder.stat().st_mode & 0o001 == 0:
            folder.chmod(0o711)
    with submission(open_path / "relay", sink, papers, credentials) as doors:
        yield doors


def test_exim_sends_a_message_in_one_chunk(open_path: Path, doors: Submission) -> None:
    body = every_octet()
    exim = EximSender(open_path / "exim")
    result = exim.send(doors.open, HEADER + body)
    assert result.said("BDAT "), result.transcript
    assert not result.said("SMTP>> DATA")
    message = doors.delivered()
    assert without_tampering(message.body) == body.replace(b"\n", b"\r\n")
    assert not [event for event in doors.relay.events("accepted") if "bare_lf" in event]


@pytest.mark.parametrize("tls", [Tls.STARTTLS, Tls.IMPLICIT])
def test_exim_logs_in_over_tls_and_sends_chunks(open_path: Path, doors: Submission, tls: Tls) -> None:
    exim = EximSender(open_path / "exim")
    result = exim.send(doors.door(tls), MESSAGE, RECIPIENT, OTHER)
    assert result.said("BDAT "), result.transcript
    assert result.said("235 2.7.0")
    message = doors.delivered()
    assert message.recipients == (RECIPIENT, OTHER)
    assert without_tampering(message.body) == b"hello\r\n"


def through_postfix(tools: PostfixTools, directory: Path, server: Server, body: bytes) -> str:
    """Hand a message to a Postfix whose next hop is `server`; its log once its queue is empty, or was not."""
    settings = PostfixSettings(
        next_hop=f"[{LOOPBACK}]:{server.port}",
        next_hop_tls="secure",
        next_hop_name=NAME,
        next_hop_ca=server.ca,
        next_hop_implicit_tls=server.tls is Tls.IMPLICIT,
        user=server.user,
        password=server.password,
    )
    with PostfixInstance(tools, directory, settings) as postfix:
        with smtplib.SMTP(LOOPBACK, postfix.smtp_port, timeout=20) as client:
            client.sendmail(SENDER, [RECIPIENT], body)
        wait_until(lambda: "status=" in postfix.log_tail(), timeout=30)
        return postfix.log_tail()


@pytest.mark.parametrize("tls", [Tls.STARTTLS, Tls.IMPLICIT])
def test_postfix_verifies_us_logs_in_and_sends(
    open_path: Path, doors: Submission, postfix_tools: PostfixTools, tls: Tls
) -> None:
    text = b"Subject: hello\r\n\r\n" + every_octet().replace(b"\n", b"\r\n")
    log = through_postfix(postfix_tools, open_path / "postfix", doors.door(tls), text)
    assert "status=sent (250 2.0.0 OK queued as" in log, log
    assert "Verified TLS connection established" in log
    message = doors.delivered()
    assert without_tampering(message.body) == without_tampering(text)
    assert b" with ESMTPSA (TLSv1.3) id " in message.body
