"""The program itself on what older releases have left: the mail goes out as it came in."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.process import PROGRAM, RelayProcess
from tests.support.sink import Sink
from tests.upgrades import fixtures
from tests.upgrades.engines import ENGINES
from zonerelay.model.queue_name import parse_queue


def stays(each: dict[str, Any]) -> bool:
    """A message that requires TLS (its report does, too), and an event for a webhook that there is not."""
    is_event = not all(parse_queue(delivery["queue"]).is_mail for delivery in each["deliveries"])
    return is_event or each["message"]["envelope"].get("require_tls", False)


@pytest.mark.parametrize("name", [name for name, engine in fixtures.stored() if engine == "leveldb"])
def test_mail_of_an_older_release_is_delivered(name: str, tmp_path: Path) -> None:
    sent = {
        ((each["message"]["envelope"]["sender"], delivery["recipient"]), each["body"])
        for each in fixtures.expected(name).values()
        for delivery in each["deliveries"]
        if not stays(each)
    }
    raw = (fixtures.DIRECTORY / name / ENGINES["leveldb"].file).read_bytes()
    ENGINES["leveldb"].unpack(raw, tmp_path)
    with Sink() as sink:
        hop = {"next_hop": f"127.0.0.1:{sink.port}", "tls": "none"}
        zones = [{"name": "default", **hop}, {"name": "other", **hop}]
        with RelayProcess(tmp_path, tables={"zone": zones}) as relay:
            release = [str(PROGRAM), "queue", "release", "--sender", "held@example.org", "--yes"]
            subprocess.run([*release, "--config", str(relay.config)], check=True, capture_output=True)
            # Nothing else is sent but the report of success that a client has asked for.
            relay.wait_for(lambda: len(relay.events("delivered")) > len(sent), what="the mail leaves")
    arrived = {
        (message.mail_from, recipient): message.sha256
        for message in sink.messages
        for recipient in message.recipients
    }
    assert arrived.items() >= sent
    assert len(arrived) == len(sent) + 1
