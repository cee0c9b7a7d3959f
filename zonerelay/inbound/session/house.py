"""What a session asks of the listener that keeps it: to be let in, to be somebody else, to be forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from zonerelay.inbound.access.networks import Client
from zonerelay.inbound.state.replies import ServerReply

if TYPE_CHECKING:
    from zonerelay.inbound.session.session import Session


class House(Protocol):
    def welcome(self, session: Session, peer: object) -> tuple[Client, ServerReply | None]:
        """Identify and count a connection, or say why not."""

    def readmit(self, client: Client, address: str, port: int) -> tuple[Client, ServerReply | None]:
        """The connection is that of another client, as a PROXY header or XCLIENT says; or why not."""

    def farewell(self, session: Session, client: Client) -> None:
        """The connection is gone: called once for every welcome without a refusal."""

    def forget(self, session: Session) -> None:
        """The connection is gone and nothing of it is still running."""
