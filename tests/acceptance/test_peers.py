"""Real peers on both sides: Postfix's smtp-source hands mail in, a real Postfix takes it as the next hop."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

from tests.support.postfix import PostfixInstance, PostfixSettings, PostfixTools
from tests.support.process import RelayProcess
from tests.support.relay import LOOPBACK
from tests.support.sink import Sink
from tests.support.submit import Submitter, tokens


async def test_postfix_as_the_next_hop_takes_everything_unchanged(
    open_path: Path, sink: Sink, postfix_tools: PostfixTools
) -> None:
    settings = PostfixSettings(next_hop=f"[{LOOPBACK}]:{sink.port}")
    with (
        PostfixInstance(postfix_tools, open_path / "postfix", settings) as postfix,
        RelayProcess(open_path / "relay", next_hop=f"{LOOPBACK}:{postfix.smtp_port}") as relay,
    ):
        client = Submitter(relay.smtp_port, prefix="via", size=30_000)
        await client.run(10, 200)
        assert len(client.acknowledged) == 200
        await sink.wait_for(200, timeout=60)
        await asyncio.to_thread(relay.wait_until_empty)
        delivered = relay.events("delivered")
    arrived = tokens(sink.messages)
    assert arrived.keys() == client.acknowledged
    assert set(arrived.values()) == {1}
    assert len(delivered) == 200
    assert "queued as" in delivered[0]["reply"]
    assert {each.body.partition(b"\r\n\r\n")[2] for each in sink.messages} == {client.body}


async def test_what_postfix_refuses_is_reported_with_its_words(
    open_path: Path, sink: Sink, postfix_tools: PostfixTools
) -> None:
    settings = PostfixSettings(next_hop=f"[{LOOPBACK}]:{sink.port}", message_size_limit=20_000)
    with (
        PostfixInstance(postfix_tools, open_path / "postfix", settings) as postfix,
        RelayProcess(open_path / "relay", next_hop=f"{LOOPBACK}:{postfix.smtp_port}") as relay,
    ):
        client = Submitter(relay.smtp_port, prefix="big", size=50_000)
        await client.run(1, 1)
        (bounce,) = await sink.wait_for(1, timeout=30)
        await asyncio.to_thread(relay.wait_until_empty)
        (bounced,) = relay.events("bounced")
    assert bounce.mail_from == ""
    assert bounce.recipients == ("app@example.org",)
    assert b"Status: 5.3.4" in bounce.body
    assert "5.3.4" in bounced["reply"]


async def test_smtp_source_is_served(tmp_path: Path, sink: Sink, postfix_tools: PostfixTools) -> None:
    with RelayProcess(tmp_path, next_hop=f"{LOOPBACK}:{sink.port}") as relay:
        command = postfix_tools.source_command(
            "-s", "10", "-l", "4096", "-m", "200", "-r", "3", "-f", "app@example.org",
            "-t", "b@example.com", f"{LOOPBACK}:{relay.smtp_port}",
        )  # fmt: skip
        done = await asyncio.to_thread(
            subprocess.run,
            command,
            env=postfix_tools.environment,
            timeout=60,
            capture_output=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, b"")
        await sink.wait_for(200, timeout=30)
        await asyncio.to_thread(relay.wait_until_empty)
    assert {len(each.recipients) for each in sink.messages} == {3}
