"""What clients were promised, what arrived, and, where that differs, what the relay's log says about it."""

from __future__ import annotations

from collections.abc import Container

from tests.support.process import RelayProcess
from tests.support.submit import Submitter

MOST = 10
"""Missing messages that are told in full."""


class Account:
    """`ids` of what was acknowledged, by token."""

    def __init__(self, *clients: Submitter) -> None:
        self.ids: dict[str, str] = {}
        for client in clients:
            self.add(client)

    def add(self, client: Submitter) -> None:
        self.ids |= client.ids

    def missing(self, arrived: Container[str], relay: RelayProcess) -> list[str]:
        """Empty when everything has arrived; else a text for each that has not, with what the log says."""
        lost = {token: identity for token, identity in self.ids.items() if token not in arrived}
        lines = relay.log_text().splitlines() if lost else []
        told = []
        for token, identity in list(lost.items())[:MOST]:
            traces = "\n    ".join(line for line in lines if identity in line) or "nothing in the log"
            told.append(f"{token} was acknowledged as {identity} and has not arrived:\n    {traces}")
        return [*told, *list(lost)[MOST:]]
