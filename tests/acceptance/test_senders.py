"""swaks at every door of a relay; what other programs do there is in `test_applications`."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.acceptance.submission import Papers, Submission, anonymous, submission
from tests.support.ports import free_port
from tests.support.senders import Swaks, Tls
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
