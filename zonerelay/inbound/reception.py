"""What all sessions of one listener share: settings, collaborators, and answers made from them once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from zonerelay.config.models import ListenerSettings
from zonerelay.inbound import answers
from zonerelay.inbound.answers import Answer
from zonerelay.inbound.turns import Turns
from zonerelay.message.headers import Fields
from zonerelay.model.clock import Clock
from zonerelay.model.envelope import Envelope
from zonerelay.model.message_id import MessageIdSource
from zonerelay.store.base import QueueStore
from zonerelay.telemetry.events import Events


class ChooseZone(Protocol):
    """Which zone delivers to this recipient; asked once the header is known."""

    def __call__(self, envelope: Envelope, recipient: str, /, *, headers: Fields) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reception:
    settings: ListenerSettings
    hostname: str
    store: QueueStore
    ids: MessageIdSource
    choose_zone: ChooseZone
    notify: Callable[[str], None]
    events: Events
    clock: Clock
    turns: Turns = field(default_factory=Turns)
    greeting: bytes = field(init=False)
    ehlo: Answer = field(init=False)
    helo: Answer = field(init=False)

    def __post_init__(self) -> None:
        # The way a frozen dataclass sets what it derives.
        object.__setattr__(self, "greeting", answers.greeting(self.hostname))
        limit = self.settings.max_message_size
        object.__setattr__(self, "ehlo", answers.ehlo(self.hostname, max_message_size=limit))
        object.__setattr__(self, "helo", answers.helo(self.hostname))
