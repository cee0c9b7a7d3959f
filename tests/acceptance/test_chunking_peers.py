"""Real servers that offer CHUNKING, as the next hop: what they say they got, and what arrives behind them."""

import re
from pathlib import Path

import pytest

from tests.support.exim import EximSender
from tests.support.ports import LOOPBACK, wait_until
from tests.support.postfix import PostfixInstance, PostfixSettings, PostfixTools
from tests.support.process import RelayProcess
from tests.support.senders import Server, Tls
from tests.support.sink import Sink
from tests.support.submit import Submitter, tokens


def counted(log: str, command: str) -> int:
    """How often Postfix says, at the end of its sessions, that it was given a command that it took."""
    found = re.findall(rf" disconnect from .* {command}=(\d+)", log)
    return sum(map(int, found))


@pytest.mark.parametrize(
    ("size", "chunking"), [(1000, True), (60_000, True), (700_000, True), (700_000, False)]
)
def test_postfix_takes_bdat(
    open_path: Path, sink: Sink, postfix_tools: PostfixTools, size: int, chunking: bool
) -> None:
    settings = PostfixSettings(next_hop=f"[{LOOPBACK}]:{sink.port}")
    zone = {"chunking": chunking, "max_connections": 2, "max_connections_per_destination": 2}
    with (
        PostfixInstance(postfix_tools, open_path / "postfix", settings) as postfix,
        RelayProcess(open_path / "relay", next_hop=f"{LOOPBACK}:{postfix.smtp_port}", zone=zone) as relay,
    ):
        client = Submitter(relay.smtp_port, prefix="bdat", size=size)
        client.send(4, 20)
        assert len(client.acknowledged) == 20
        sink.until(20, timeout=60)
        relay.wait_until_empty()
        assert len(relay.events("delivered")) == 20
        relay.terminate()

        def ended() -> bool:
            return counted(postfix.log_text(), "mail") >= 20

        assert wait_until(ended, timeout=20)
        log = postfix.log_text()
    assert {each.body.partition(b"\r\n\r\n")[2] for each in sink.messages} == {client.body}
    assert set(tokens(sink.messages).values()) == {1}
    if not chunking or size > 64 * 1024:
        assert (counted(log, "bdat"), counted(log, "data")) == (0, 20)
        return
    assert counted(log, "data") == 0
    sessions = len(re.findall(" disconnect from .* bdat=", log))
    # The first message of a connection takes two.
    assert counted(log, "bdat") == 20 + sessions
    assert not re.search("improper|pipelining|warning: .*(?:command|BDAT)", log)


def test_postfix_refuses_all_recipients(open_path: Path, sink: Sink, postfix_tools: PostfixTools) -> None:
    settings = PostfixSettings(next_hop=f"[{LOOPBACK}]:{sink.port}")
    postfix = PostfixInstance(postfix_tools, open_path / "postfix", settings)
    with (postfix.directory / "config" / "main.cf").open("a") as file:
        file.write("smtpd_recipient_restrictions = check_recipient_access inline:{no@example.com=REJECT}\n")

    zone = {"chunking": True, "max_connections": 1}
    with (
        postfix,
        RelayProcess(open_path / "relay", next_hop=f"{LOOPBACK}:{postfix.smtp_port}", zone=zone) as relay,
    ):
        for recipients in (["a@example.com"], ["no@example.com"], ["no@example.com", "b@example.com"]):
            relay.send(*recipients)
        relay.wait_until_empty()
        assert len(relay.events("delivered")) >= 2
        bounced = relay.events("bounced")
    assert len(bounced) == 2
    assert all("Access denied" in each["reply"] for each in bounced)


@pytest.mark.parametrize("size", [1000, 700_000])
def test_exim_takes_bdat(open_path: Path, sink: Sink, size: int) -> None:
    exim = EximSender(open_path / "exim")
    server = Server(port=sink.port, tls=Tls.NONE)
    with (
        exim.receiving(server) as port,
        RelayProcess(
            open_path / "relay", next_hop=f"{LOOPBACK}:{port}", zone={"chunking": True, "max_connections": 1}
        ) as relay,
    ):
        client = Submitter(relay.smtp_port, prefix="exim", size=size)
        client.send(1, 5)
        sink.until(5, timeout=60)
        relay.wait_until_empty()
        delivered = relay.events("delivered")
    assert len(delivered) == 5
    assert {each.body.partition(b"\r\n\r\n")[2] for each in sink.messages} == {client.body}
    arrivals = [line for line in exim.log().splitlines() if " <= " in line]
    assert len(arrivals) == 5
    assert all(bool(re.search(r" K(?: |$)", line)) is (size < 64 * 1024) for line in arrivals), arrivals
