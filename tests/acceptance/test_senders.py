"""Programs that people send mail with, at every door of a relay: swaks, msmtp, PHP's mail(), s_client."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.acceptance.submission import Papers, Submission, anonymous, submission
from tests.support.ports import free_port
from tests.support.senders import RECIPIENT, SENDER, Msmtp, Openssl, PhpMail, Swaks, Tls
from tests.support.sink import Sink

TEXT = b"From: app@example.org\nSubject: hello\n\n.one dot\n..two\nGr\xc3\xbc\xc3\x9fe\n"
ARRIVED = b".one dot\r\n..two\r\nGr\xc3\xbc\xc3\x9fe\r\n"


@pytest.fixture(scope="module")
def swaks() -> Swaks:
    return Swaks()


@pytest.fixture(scope="module")
def house(
    tmp_path_factory: pytest.TempPathFactory, papers: Papers, credentials: Path
) -> Iterator[Submission]:
    """One relay for all: a test brings only the sink, on the port that is meant."""
    sink = Sink(port=free_port())
    with submission(tmp_path_factory.mktemp("relay"), sink, papers, credentials) as house:
        yield house


@pytest.fixture
def doors(house: Submission) -> Iterator[Submission]:
    with Sink(port=house.sink.port) as sink:
        yield replace(house, sink=sink)


def test_swaks_in_clear_text_from_a_network_that_may_relay(swaks: Swaks, doors: Submission) -> None:
    result = swaks.send(doors.open, TEXT)
    assert result.code == 0, result.transcript
    message = doors.delivered()
    assert message.body.endswith(ARRIVED)
    assert b" with ESMTP id " in message.body


@pytest.mark.parametrize("mechanism", ["PLAIN", "LOGIN"])
@pytest.mark.parametrize("tls", [Tls.STARTTLS, Tls.IMPLICIT])
def test_swaks_logs_in_over_tls(swaks: Swaks, doors: Submission, tls: Tls, mechanism: str) -> None:
    result = swaks.send(replace(doors.door(tls), auth=mechanism), TEXT)
    assert result.code == 0, result.transcript
    assert result.said("235 2.7.0")
    message = doors.delivered()
    assert message.body.endswith(ARRIVED)
    assert b" with ESMTPSA (TLSv1.3) id " in message.body


def test_a_listed_client_certificate_is_enough(swaks: Swaks, doors: Submission) -> None:
    client = doors.papers.client
    result = swaks.send(replace(anonymous(doors.starttls), certificate=client, key=client), TEXT)
    assert result.code == 0, result.transcript
    assert doors.delivered().body.endswith(ARRIVED)


def test_pipelined_commands_of_swaks_are_answered_in_order(swaks: Swaks, doors: Submission) -> None:
    result = swaks.send(doors.implicit, TEXT, "--pipeline")
    assert result.code == 0, result.transcript
    assert doors.delivered().body.endswith(ARRIVED)


@pytest.mark.parametrize("tls", [Tls.STARTTLS, Tls.IMPLICIT])
def test_msmtp_verifies_us_and_logs_in(tmp_path: Path, doors: Submission, tls: Tls) -> None:
    result = Msmtp(tmp_path).send(doors.door(tls), TEXT)
    assert result.code == 0, result.transcript
    assert doors.delivered().body.endswith(ARRIVED)


def test_msmtp_is_told_that_the_password_is_wrong(tmp_path: Path, doors: Submission) -> None:
    wrong = replace(doors.implicit, password="wrong")
    result = Msmtp(tmp_path).send(wrong, TEXT)
    assert result.code == 77  # EX_NOPERM
    assert result.said("535 5.7.8")


def test_php_mail_through_a_sendmail_that_logs_in(tmp_path: Path, doors: Submission) -> None:
    sendmail = Msmtp(tmp_path).sendmail(doors.starttls)
    result = PhpMail().send(
        sendmail,
        to=RECIPIENT,
        subject="Rückruf",
        body="line one\n.line two\r\nline three\n",
        headers={"From": SENDER, "X-Shop": "42"},
    )
    assert result.code == 0, result.transcript
    message = doors.delivered()
    assert message.recipients == (RECIPIENT,)
    assert b"\r\nSubject: R\xc3\xbcckruf\r\n" in message.body
    assert b"\r\nX-Shop: 42\r\n" in message.body
    assert b"\r\n\r\nline one\r\n.line two\r\nline three\r\n" in message.body


@pytest.mark.parametrize("tls", [Tls.STARTTLS, Tls.IMPLICIT])
def test_openssl_finds_nothing_wrong_with_our_tls(doors: Submission, tls: Tls) -> None:
    result = Openssl().connect(doors.door(tls))
    assert result.code == 0, result.transcript
    assert result.said("Verify return code: 0 (ok)")
    assert result.said("TLSv1.3")
    assert result.said("221 2.0.0")


def test_openssl_cannot_have_an_old_tls(doors: Submission) -> None:
    old = Openssl().connect(doors.implicit, "-tls1_1", "-cipher", "ALL:@SECLEVEL=0")
    assert old.code != 0
    assert not old.said("220 relay.test")
    recent = Openssl().connect(doors.implicit, "-tls1_2")
    assert recent.code == 0, recent.transcript
    assert recent.said("221 2.0.0")
