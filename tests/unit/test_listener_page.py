"""docs/send/listener.md cannot drift: every reason and every refusal is explained, every example loads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zonerelay.config.load import load_text
from zonerelay.inbound.refusal import Reason
from zonerelay.inbound.state import replies
from zonerelay.inbound.state.replies import ServerReply

PAGE = (Path(__file__).parents[2] / "docs" / "send" / "listener.md").read_text()
EXAMPLES = re.findall(r"^```toml\n(.+?)^```", PAGE, re.MULTILINE | re.DOTALL)
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ")]

REFUSALS = {
    name: answer
    for name, answer in vars(replies).items()
    if isinstance(answer, ServerReply) and answer.reason is not None and answer.wire
}


def row_of(reason: Reason) -> str:
    (row,) = [line for line in ROWS if f"| `{reason.value}` |" in line]
    return row


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_is_explained_once(reason: Reason) -> None:
    assert len(row_of(reason).split(" | ")) == 3


@pytest.mark.parametrize("name", list(REFUSALS))
def test_every_refusal_stands_beside_its_reason(name: str) -> None:
    answer = REFUSALS[name]
    assert answer.reason is not None
    code = f"`{answer.reply.code} {answer.reply.status}`"
    row = row_of(answer.reason)
    assert code in row or f"`{answer.reply.code}`" in row, f"{name}: {answer.reply}"


def test_no_reason_is_explained_that_there_is_not() -> None:
    table = PAGE.partition("| reply | reason | what to do |\n")[2].partition("\n\n")[0]
    explained = [re.findall(r"`([^`]+)`", line.split(" | ")[1])[0] for line in table.splitlines()[1:]]
    assert set(explained) == {reason.value for reason in Reason}


@pytest.mark.parametrize("text", EXAMPLES, ids=range(len(EXAMPLES)))
def test_every_example_is_a_configuration(text: str) -> None:
    load_text(text)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 4
    assert re.findall(r"^```(\w+)$", PAGE, re.MULTILINE) == [
        "toml",
        "toml",
        "toml",
        "haproxy",
        "toml",
        "nginx",
        "ini",
    ]


def test_every_default_is_that_of_the_configuration() -> None:
    (listener,) = load_text("").listener
    for text in (
        f"`max_connections` {listener.max_connections},",
        f"`max_connections_per_client` {listener.max_connections_per_client},",
        f"`max_connections_per_network` {listener.max_connections_per_network} |",
        f"`idle_timeout` {listener.idle_timeout / 60:.0f} min |",
        f"`transaction_timeout` {listener.transaction_timeout / 60:.0f} min |",
        f"`min_data_rate` {listener.min_data_rate} |",
        f"`max_commands` {listener.max_commands:,}, `max_errors` {listener.max_errors} |",
        f"`max_message_size` {listener.max_message_size >> 20} MB,",
        f"`max_header_size` {listener.max_header_size >> 10} KB,",
        f"`max_received` {listener.max_received}, `max_recipients` {listener.max_recipients} |",
        f"| `max_auth_failures` in one connection | {listener.max_auth_failures} |",
    ):
        assert text in PAGE, text
