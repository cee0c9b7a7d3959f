"""Transcripts: the protocol lines of selected sessions, which an operator reads while they are sent.

While no transcript runs, sessions only check `on`. A client's line is shown if it is a completely known
command. Of everything else, including all of AUTH, possible secrets and possible text of a message, only the
number of bytes is shown. Control characters are replaced by visible ones. A transcript ends after its time or
its bytes, records a limited number of sessions, and never delays mail.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address
from typing import Generic, TypeVar

from zonerelay.model.clock import Clock
from zonerelay.telemetry.events.records import TranscriptLine
from zonerelay.telemetry.logs.redact import printable

# The bounded buffer between what happens and one operator who reads along.
#
# A reader that is slow loses what does not fit, and is told how much; the writer never waits. Threads may
# write.

T = TypeVar("T")


class BoundedStream(Generic[T]):
    """A bounded queue of items for one reader, which counts the items that do not fit. Call `put` anywhere,
    and `take` on the event loop that created the stream.
    """

    def __init__(self, room: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: deque[T] = deque()
        self._room = room
        self._missed = 0
        self._some = asyncio.Event()
        self._reported = False  # the reader will check
        self.why = ""
        """The reason why nothing more comes."""

    def put(self, item: T) -> None:
        if self.why:
            return
        if len(self._items) >= self._room:
            self._missed += 1
            return
        self._items.append(item)
        if not self._reported:
            self._reported = True
            self._loop.call_soon_threadsafe(self._some.set)

    def close(self, why: str) -> None:
        """End the stream; the reader still gets the buffered items, and the reason."""
        self.why = self.why or why
        self._some.set()

    async def take(self) -> tuple[list[T], int]:
        """Wait for items, and return them and the number of items missing after them, or nothing after
        `close`.
        """
        self._reported = False
        while not self._items and not self.why:
            self._some.clear()
            await self._some.wait()
            self._reported = False
        # a thread may add more in the meantime
        taken = [self._items.popleft() for _ in range(len(self._items))]
        missed, self._missed = self._missed, 0
        return taken, missed


MAX_TRANSCRIPTS = 4
"""At the same time, in one worker."""
MAX_SHOWN = 1000
"""Bytes of one line."""
ROOM = 10_000
"""Lines that wait for the reader."""

# Compiled on first use, because most relays have no transcript.
_COMMAND = (
    rb"(?i)(?:(?:EHLO|HELO|LHLO) +\S+|(?:MAIL FROM|RCPT TO): *(?:<[^>\r\n]*>|\S*)(?: +[A-Z0-9-]+(?:=\S*)?)*"
    rb"|BDAT +\d+(?: +LAST)?|DATA|RSET|QUIT|STARTTLS|NOOP|HELP)[ \t]*"
)
_XCLIENT = rb"(?i)(XCLIENT|XFORWARD)((?: (?:NAME|ADDR|PORT|PROTO|HELO|DEST[A-Z]+|LOGIN)=[^\s]*)*)"
_LOGIN = rb"(?i)(?<= LOGIN=)\S+"
_AUTH = (
    rb"(?i)(AUTH (?:PLAIN|LOGIN|XOAUTH2|OAUTHBEARER|CRAM-MD5|DIGEST-MD5|SCRAM-SHA-\d+(?:-PLUS)?|NTLM|GSSAPI"
    rb"|EXTERNAL))(?: |$)"
)
"""Of known mechanisms only: a client may send a secret at the wrong place."""
_CHUNK = rb"(?i)BDAT +(\d+)"


@dataclass(eq=False, repr=False)
class RunningTranscript:
    """One running transcript of selected sessions, which ends after a number of bytes or sessions."""

    stream: BoundedStream[TranscriptLine]
    _: KW_ONLY
    networks: tuple[IPv4Network | IPv6Network, ...] = ()
    domain: str = ""
    message_id: str = ""
    octets: int
    sessions: int

    def __post_init__(self) -> None:
        self.domain = self.domain.lower().rstrip(".")

    def begin(self) -> bool:
        """Count a session that the transcript is to include. Return False if it exceeds the limit."""
        if self.stream.why:
            return False
        if not self.sessions:
            self.stream.close("the requested number of sessions was reached")
            return False
        self.sessions -= 1
        return True

    def put(self, line: TranscriptLine) -> None:
        self.octets -= len(line.text) + 1
        if self.octets < 0:
            self.stream.close("the requested number of bytes was reached")
        self.stream.put(line)


class Transcripts:
    """All running transcripts of one worker."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.on = False
        self._running: list[RunningTranscript] = []
        self._sessions = 0

    def start(self, transcript: RunningTranscript) -> bool:
        """Start a transcript. Return False if the maximum number is running."""
        if len(self._running) >= MAX_TRANSCRIPTS:
            return False
        self._running.append(transcript)
        self.on = True
        return True

    def stop(self, transcript: RunningTranscript) -> None:
        transcript.stream.close("stopped")
        self._running.remove(transcript)
        self.on = bool(self._running)

    def inbound(self, client: str, before: SessionRecorder | None = None) -> SessionRecorder | None:
        """Return a recorder for a session with this client, or None if no transcript includes it."""

        def wanted(each: RunningTranscript) -> bool:
            try:
                address = ip_address(client.removeprefix("::ffff:"))
            except ValueError:  # a Unix socket
                return False
            return any(address in network for network in each.networks)

        return self._record("inbound", client, wanted, before)

    def outbound(
        self, names: Iterable[str], message_id: str, peer: str, before: SessionRecorder | None = None
    ) -> SessionRecorder | None:
        """Return a recorder for a connection if a transcript selects its message or one of its `names`
        (domains and the host), or None.
        """

        def wanted(each: RunningTranscript) -> bool:
            return bool(
                (each.message_id and each.message_id == message_id)
                or (each.domain and each.domain in (name.lower().rstrip(".") for name in names))
            )

        return self._record("outbound", peer, wanted, before)

    def _record(
        self,
        side: str,
        peer: str,
        wanted: Callable[[RunningTranscript], bool],
        before: SessionRecorder | None,
    ) -> SessionRecorder | None:
        known = () if before is None or before.peer != peer else before.to
        matching = [each for each in self._running if not each.stream.why and wanted(each)]
        if before is not None and known and len(matching) == len(known) and all(e in known for e in matching):
            return before
        to = tuple(each for each in matching if each in known or each.begin())
        if not to:
            return None
        self._sessions += 1
        record = SessionRecorder(self._sessions, side, peer, to, self._clock)
        record.note("the recording starts here")
        return record


@dataclass(eq=False, repr=False)
class SessionRecorder:
    """Records the protocol lines of one session in transcripts. `commands` are those of the client, `replies`
    those of the server.
    """

    session: int
    side: str
    peer: str
    to: tuple[RunningTranscript, ...]
    clock: Clock

    def __post_init__(self) -> None:
        self._rest = 0  # bytes of a chunk that are still to come
        self._body = 0  # bytes of a message, while it is sent
        self._data = False  # the last command was DATA
        self._in_body = False
        self._secret = False  # the exchange of AUTH goes on
        self._part = b""  # of a line

    def command(self, line: bytes, *, secret: bool = False) -> None:
        """Record a command line from the client, without its line end. With `secret`, the line is a response
        to an AUTH challenge.
        """
        self._data = line.strip().upper() == b"DATA"
        found = None if secret else re.match(_AUTH, line)
        self._secret = secret or found is not None
        if found is not None:
            left = len(line) - found.end()
            said = found[1].decode() + (f" ({left} bytes not shown)" if left > 0 else "")
        elif not secret and re.fullmatch(_COMMAND, line):
            said = _shown(line)
        elif not secret and re.fullmatch(_XCLIENT, line):
            said = _shown(re.sub(_LOGIN, b"(not shown)", line))
        else:
            said = f"({len(line)} bytes not shown)"
        self._put("received" if self.side == "inbound" else "sent", said)

    def commands(self, octets: bytes) -> None:
        """Record bytes from the client: commands with chunks between them, or a message body."""
        while octets:
            if self._in_body:
                self._body += len(octets)
                return
            if self._rest:
                taken = min(self._rest, len(octets))
                octets, self._rest = octets[taken:], self._rest - taken
                continue
            line, _, octets = octets.partition(b"\r\n")
            self.command(line)
            if chunk := re.match(_CHUNK, line):
                self._rest = int(chunk[1])

    def replies(self, octets: bytes) -> None:
        """Record bytes from the server, which are replies."""
        whole, end, self._part = (self._part + octets).rpartition(b"\n")
        self._part = self._part[:MAX_SHOWN]
        if end and self._in_body:
            self.note(f"the message as sent: {self._body} bytes, not shown")
            self._in_body, self._body = False, 0
        for line in (each.rstrip(b"\r") for each in whole.split(b"\n") if end):
            if self._data and line.startswith(b"354") and self.side == "outbound":
                self._in_body, self._data = True, False
            said = _shown(line)
            if self._secret and self.side == "outbound":
                said = f"{line[:3].decode('ascii', 'replace')} ({max(len(line) - 4, 0)} bytes not shown)"
            elif line.startswith(b"334"):
                said = "334 (challenge not shown)"
            self._put("sent" if self.side == "inbound" else "received", said)

    def joined(self, phase: str, in_body: bool) -> None:
        """Begin to record a session that is already in progress. With `in_body`, the next bytes belong to a
        message.
        """
        self._in_body = in_body
        self.note(phase)

    def note(self, text: str) -> None:
        self._put("note", printable(text))

    def _put(self, direction: str, text: str) -> None:
        line = TranscriptLine(self.clock.now(), self.session, self.side, self.peer, direction, text)
        for transcript in self.to:
            transcript.put(line)


def _shown(line: bytes) -> str:
    text = printable(line[:MAX_SHOWN].decode("utf-8", "replace"))
    return text if len(line) <= MAX_SHOWN else f"{text}… ({len(line)} bytes)"
