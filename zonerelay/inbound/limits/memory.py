"""Counts the memory that all client sessions of a worker use, and limits it.

One `SessionMemory` serves all listeners. Sessions add the memory that they use to `used` and subtract it when
they free it: unread input, headers that are being read, bodies that wait for the store, and `TLS_COST` while
TLS is active. Each change is an integer addition. Each open connection costs another `SESSION_COST` for its
objects.

Policy: above `TIGHT` of the limit, new connections are refused. Their clients can try again later, while
transactions in progress should complete. At the limit, the session that uses the most memory is ended,
because this frees the most memory with the least harm. A session whose message has been received completely
is never ended: it will get its reply, and ending it would free nothing.
"""

import asyncio
from collections import OrderedDict
from operator import attrgetter
from typing import Protocol

# Reads a few large bodies at full speed at the same time; the others wait in their socket buffers.
#
# Fifty uploads that are read simultaneously would all end late and fill the memory with incomplete bodies,
# and the store would no longer have them in its cache at delivery. If only a few are read at a time, the
# first ones are being delivered while the last ones arrive.
#
# Policy: a body of more than `LARGE` bytes needs a slot while it arrives faster than it is read, that is, in
# reads of `FAST` bytes or more. `AT_ONCE` bodies have a slot at the same time. The others are not read and
# get their slots in order of arrival. A session loses its slot at the end of the body, with the first read of
# fewer than `FAST` bytes (the relay has caught up with the client), or, while others wait, after `PATIENCE`
# seconds without data. So small messages and slow clients never wait and never delay others.

LARGE = 256 * 1024
FAST = 64 * 1024
AT_ONCE = 4
PATIENCE = 0.05


class BodyReceiver(Protocol):
    """Interface: a session that receives a large body."""

    @property
    def held_up(self) -> bool:
        """Whether the relay itself has paused reading of this body."""

    def resume_reading(self) -> None:
        """Resume reading the body, because it now has a slot."""


class LargeBodies:
    """Limits how many large bodies are received at the same time, by slots. Every session that has called
    `may_read` must call `leave`.
    """

    def __init__(self, at_once: int = AT_ONCE, patience: float = PATIENCE) -> None:
        self._at_once = at_once
        self._patience = patience
        self._heard: dict[BodyReceiver, float] = {}  # readers with a slot, and the time of their last data
        self._waiting: OrderedDict[BodyReceiver, None] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None

    def may_read(self, reader: BodyReceiver, size: int) -> bool:
        """Return whether the session may read more of its body; otherwise it waits for `resume_reading`.
        `size` bytes of a large body have arrived.
        """
        if size < FAST:
            self.leave(reader)
            return True
        if reader not in self._heard:
            self._waiting[reader] = None
            if len(self._waiting) > 1 or len(self._heard) >= self._at_once:
                self._watch()
                return False
            del self._waiting[reader]
        self._heard[reader] = asyncio.get_running_loop().time()
        return True

    def leave(self, reader: BodyReceiver) -> None:
        """Release the slot of a session whose body has ended. Do nothing if the session has none."""
        self._waiting.pop(reader, None)
        if self._heard.pop(reader, None) is not None:
            self._hand_out()

    def _hand_out(self) -> None:
        while self._waiting and len(self._heard) < self._at_once:
            reader = self._waiting.popitem(last=False)[0]
            self._heard[reader] = asyncio.get_running_loop().time()
            reader.resume_reading()

    def _watch(self) -> None:
        if self._timer is None and self._waiting:
            self._timer = asyncio.get_running_loop().call_later(self._patience, self._look)

    def _look(self) -> None:
        """Withdraw the slots of clients that have stopped sending."""
        self._timer = None
        before = asyncio.get_running_loop().time() - self._patience
        for reader in [each for each, heard in self._heard.items() if heard < before and not each.held_up]:
            del self._heard[reader]
        self._hand_out()
        self._watch()


SESSION_COST = 4 * 1024
"""Bytes used by an idle connection. Measured: resident memory grew by 2.7 KB for each of 5,000 connections
after EHLO. The rest is for the data of the session, such as the client's name and a transaction.
"""

TLS_COST = 36 * 1024
"""Bytes that OpenSSL uses for one connection. Measured: 20 to 35 KB with TLS 1.3 and released buffers."""

TIGHT = 0.8  # of the limit


class MemoryHolder(Protocol):
    """Interface: a session or submission whose memory is counted."""

    @property
    def held(self) -> int:
        """The bytes that this session has added to `SessionMemory.used`."""

    @property
    def must_stay(self) -> bool:
        """Whether ending this session would free no memory, or would lose a message that the client has sent
        completely.
        """

    def shed(self) -> None:
        """End this session to free its memory."""


class SessionMemory:
    """The memory that all sessions of a worker use, with its limit. Sessions change `used` (bytes)
    themselves; `holders` are the open sessions.
    """

    __slots__ = ("_limit", "_tight", "holders", "used")

    def __init__(self, limit: int) -> None:
        self.used = 0
        self.holders: set[MemoryHolder] = set()
        self.change(limit)

    def change(self, limit: int) -> None:
        """Set the limit of the memory of all sessions, in bytes."""
        self._limit = limit
        self._tight = int(limit * TIGHT)

    @property
    def total(self) -> int:
        return self.used + len(self.holders) * SESSION_COST

    @property
    def tight(self) -> bool:
        """Whether so much memory is used that new connections must be refused."""
        return self.used + len(self.holders) * SESSION_COST >= self._tight

    @property
    def full(self) -> bool:
        """Whether so much memory is used that a session must be ended."""
        return self.used + len(self.holders) * SESSION_COST >= self._limit

    def relieve(self) -> None:
        """End the session that uses the most memory, on any listener. Do nothing if that would free
        nothing.
        """
        most = max(
            (each for each in self.holders if not each.must_stay), key=attrgetter("held"), default=None
        )
        if most is not None and most.held > 0:
            most.shed()
