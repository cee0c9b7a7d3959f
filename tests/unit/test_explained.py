"""What a page explains in a table is what the code has: every option, value and reason."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields
from enum import Enum
from typing import Any

import pytest

from tests.unit.test_names_in_docs import ROOT
from zonerelay.config.load import load_text
from zonerelay.config.settings import (
    Backend,
    CredentialSettings,
    DestinationSettings,
    RouteSettings,
    SourceSettings,
    TlsMode,
)
from zonerelay.inbound.refusal import Reason
from zonerelay.inbound.state import replies
from zonerelay.inbound.state.replies import ServerReply
from zonerelay.message.dkim.dns_record import RecordStatus
from zonerelay.operations.requests import CHANGES
from zonerelay.outbox.database.tables import WRITTEN_BY_APPLICATIONS
from zonerelay.smtp.client.reputation import CLASSES

REFUSALS = {
    name: answer
    for name, answer in vars(replies).items()
    if isinstance(answer, ServerReply) and answer.reason is not None and answer.wire
}


def names(described: type[Any]) -> list[str]:  # Any: an enumeration, or a dataclass
    """The values of an enumeration, or the fields of a table."""
    if issubclass(described, Enum):
        return [each.value for each in described]
    return [field.name for field in fields(described)]


@pytest.mark.parametrize(
    ("page", "explained"),
    [
        ("deliver/destinations.md", names(DestinationSettings)),
        ("deliver/dkim.md", names(RecordStatus)),
        ("deliver/replies.md", CLASSES),
        ("deliver/routing.md", names(RouteSettings)),
        ("deliver/smarthosts.md", names(CredentialSettings)),
        ("deliver/sources.md", names(SourceSettings)),
        ("deliver/tls.md", names(TlsMode)),
        ("operate/operating.md", CHANGES),
        ("send/listener.md", names(Reason)),
        ("send/outbox.md", WRITTEN_BY_APPLICATIONS),
        ("store/engines.md", names(Backend)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_name_is_explained(page: str, explained: Iterable[str]) -> None:
    text = (ROOT / "docs" / page).read_text()
    missing = [
        name for name in explained if not re.search(rf"`[^`\n]*\b{name}\b|^{name} = ", text, re.MULTILINE)
    ]
    assert missing == []


@pytest.mark.parametrize("name", list(REFUSALS))
def test_every_refusal_has_its_code_beside_its_reason(name: str) -> None:
    answer = REFUSALS[name]
    assert answer.reason is not None
    rows = (ROOT / "docs" / "send" / "listener.md").read_text().splitlines()
    (row,) = [line for line in rows if f"| `{answer.reason.value}` |" in line]
    assert f"`{answer.reply.code} {answer.reply.status}`" in row or f"`{answer.reply.code}`" in row


def test_the_fields_that_are_dropped_are_those_of_the_default() -> None:
    page = (ROOT / "docs" / "deliver" / "rewriting.md").read_text()
    table = page.partition("## What is dropped")[2].partition("\n\n- ")[0]
    cells = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")]
    found = re.findall(r"`([A-Z][\w-]+)`", " ".join(cells))
    assert tuple(found) == load_text("").listener[0].drop_headers
