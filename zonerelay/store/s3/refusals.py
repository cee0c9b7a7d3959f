"""Messages that were given up: their clients have heard 451 and come again, so they must never be delivered.

The service may carry out a write without an answer later, even after a restart of this relay. So a
*refusal* is written under the message's name, on the condition that no object is there. The message was
written on the same condition, so the later of the two fails. If the message came first, the refusal
replaces it. A refusal stays for `KEPT` seconds; a later walk through the bucket removes it.

A service without conditions lets a late write through. There the ids are remembered for `KEPT` seconds, not
over a restart, and the next walk through the bucket removes what has come.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from zonerelay.model.clock import Clock
from zonerelay.model.message_id import MessageId
from zonerelay.store.contract import StoreCorruptError
from zonerelay.store.s3 import records as spelled
from zonerelay.store.s3.client import ConflictError, MissingError
from zonerelay.store.s3.objects import Objects, Version
from zonerelay.store.s3.own_messages import OwnMessages
from zonerelay.store.s3.records import Head

KEPT = 3600.0
"""Seconds after which no service carries out what it was asked."""
MOST = 10_000
"""Ids that are remembered where there are no conditions."""

_log = logging.getLogger("zonerelay.store")


class Refusals:
    """One per store. `throw_away` removes a body that no message names."""

    def __init__(
        self, objects: Objects, mine: OwnMessages, *, throw_away: Callable[[str], None], clock: Clock
    ) -> None:
        self.open: dict[MessageId, str] = {}
        """In doubt, and nothing has been done about it yet; the session that each was written under."""
        self._objects = objects
        self._mine = mine
        self._throw_away = throw_away
        self._clock = clock
        self._remembered: dict[MessageId, float] = {}

    def note(self, message_id: MessageId, session: str) -> None:
        """It may have been stored, or may be yet."""
        self.open[message_id] = session
        if not self._objects.abilities.conditional_put:
            self._remembered[message_id] = self._clock.monotonic() + KEPT
            while len(self._remembered) > MOST:
                del self._remembered[next(iter(self._remembered))]

    async def settle(self) -> None:
        """The service is there (again): refuse what is in doubt. Raises StoreError."""
        for message_id, session in list(self.open.items()):
            try:
                if await self._refuse(message_id, session):
                    self._throw_away(self._objects.keys.body(message_id, session))
            except (ConflictError, MissingError):
                continue  # another relay was faster: the next beat looks at it again
            except StoreCorruptError as error:
                _log.error("left for the operator: %s", error)
            self.open.pop(message_id, None)

    async def _refuse(self, message_id: MessageId, session: str) -> bool:
        """True when nothing is left of it, and nothing will come; false when a relay has it now."""
        if message_id in self._mine.ids:
            return False
        has_conditions = self._objects.abilities.conditional_put
        refusal = Head(format=spelled.FORMAT, owner=session, rev=1, refused=self._clock.now())
        if has_conditions:
            try:
                await self._objects.create(message_id, refusal, b"")
            except ConflictError:
                _log.info("message %s: what was given up has been stored", message_id)
            else:
                return True
        try:
            found = await self._objects.read_head(message_id)
        except MissingError:
            if has_conditions:
                raise
            return True
        if found.head.is_over:
            return True  # our own refusal, the answer to which was lost
        if found.head.owner not in (session, ""):
            return False
        if has_conditions:
            # Not removed: a client may have sent its request twice.
            await self._objects.replace(message_id, refusal, b"", etag=found.etag)
        else:
            await self._objects.remove(message_id, found.head, etag=found.etag)
        return True

    # --- what a walk through the bucket finds

    def stands(self, head: Head) -> bool:
        """A refusal that is still needed. A clock that was far off must not keep it for years."""
        return bool(head.refused) and abs(self._clock.now() - head.refused) < KEPT

    async def came_late(self, message_id: MessageId, version: Version) -> bool:
        """It was given up: not to be delivered. Raises StoreError."""
        if message_id in self.open:
            return True  # `settle` sees to it
        until = self._remembered.get(message_id)
        if until is None or self._clock.monotonic() > until:
            return False
        await self._objects.remove(message_id, version.head, etag=version.etag)
        return True
