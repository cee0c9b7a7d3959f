"""Live streams for operators: the events of a worker as they happen, and the transcripts of its sessions.

A slow reader loses what does not fit in its buffer, and receives the number of lost entries; mail never waits
for a reader.
"""

import asyncio
import contextlib
import fnmatch
from collections.abc import Callable, Iterable, Iterator, Sequence
from ipaddress import ip_address, ip_network
from typing import TypeVar

import msgspec

from zonerelay.control.runner import ResponseStream
from zonerelay.model.bounded import BoundedDict
from zonerelay.model.envelope import is_message_id
from zonerelay.operations.answers import EndFrame, StreamGap
from zonerelay.operations.errors import BusyError, InvalidError
from zonerelay.operations.requests import Tail
from zonerelay.operations.requests import Transcript as TranscriptRequest
from zonerelay.telemetry.events.events import Events, Field
from zonerelay.telemetry.events.records import MailEvent, TranscriptLine
from zonerelay.telemetry.events.transcript import MAX_TRANSCRIPTS, ROOM, BoundedStream, RunningTranscript
from zonerelay.telemetry.logs.redact import Redactor, SearchForms, UnsearchableError, form_of

T = TypeVar("T", MailEvent, TranscriptLine)

MAX_FOLLOWERS = 16
EVENTS_ROOM = 2000
"""Events that wait for their reader."""
MAX_MESSAGES = 10_000
"""Messages of a sender, a user or a client whose later events are told, too."""


class LiveStreams:
    """The event streams and transcripts of one worker that operators are reading."""

    def __init__(self, events: Events, redactor: Redactor, join: Callable[[], None] = lambda: None) -> None:
        """Prepare for the streams that operators request. `join` is called so that a new transcript records
        the transactions that are under way.
        """
        self._join = join
        self._events = events
        self._redactor = redactor
        self._followers = 0

    async def tail(self, request: Tail, answer: ResponseStream) -> EndFrame:
        """Stream mail events until the client disconnects. Raise BusyError if there are too many streams,
        InvalidError if the filter is not valid.
        """
        if self._followers >= MAX_FOLLOWERS:
            raise BusyError(f"the limit of {MAX_FOLLOWERS} readers is reached; stop one of them")
        try:
            wanted = _TailFilter(request, self._redactor)
        except UnsearchableError as error:
            raise InvalidError(str(error)) from error
        stream: BoundedStream[MailEvent] = BoundedStream(EVENTS_ROOM)

        def shown(events: Sequence[MailEvent]) -> Iterable[MailEvent]:
            record = [each for each in events if wanted(each.event, each.fields)]
            return self._with_addresses(record) if answer.call.clear else record

        self._followers += 1
        self._events.follow(stream)
        try:
            return await _sent(stream, answer, shown)
        finally:
            self._followers -= 1
            self._events.leave(stream)

    def _with_addresses(self, record: Sequence[MailEvent]) -> Iterator[MailEvent]:
        """Yield the events, with pseudonyms replaced by addresses that the relay still has in memory."""
        texts = (text for each in record for text in each.fields.values() if isinstance(text, str))
        clear = self._redactor.clear(texts)
        for each in record:
            fields = {
                name: clear(text) if isinstance(text, str) else text for name, text in each.fields.items()
            }
            yield msgspec.structs.replace(each, fields=fields)

    async def transcribe(self, request: TranscriptRequest, answer: ResponseStream) -> EndFrame:
        """Stream protocol lines until a requested limit of time, bytes or sessions is reached, or the client
        disconnects. Raise BusyError if there are too many streams, InvalidError if the filter is not valid.
        """
        stream: BoundedStream[TranscriptLine] = BoundedStream(ROOM)
        transcript = _checked(request, stream)
        if not self._events.transcripts.start(transcript):
            raise BusyError(
                f"the limit of {MAX_TRANSCRIPTS} running transcripts is reached; stop one of them"
            )
        subject = request.client or request.domain or request.message_id
        self._events.transcript_begun(subject, request.seconds, answer.caller)
        self._join()
        timer = asyncio.get_running_loop().call_later(
            request.seconds, stream.close, "the time limit of the transcript was reached"
        )
        try:
            return await _sent(stream, answer, lambda lines: lines)
        finally:
            timer.cancel()
            self._events.transcripts.stop(transcript)


async def _sent(
    stream: BoundedStream[T], answer: ResponseStream, shown: Callable[[Sequence[T]], Iterable[T]]
) -> EndFrame:
    """Send the items of a stream to the client until the stream is closed."""
    count = 0
    while True:
        found, missed = await stream.take()
        for each in shown(found):
            await answer.send(each)
        count += len(found)
        if missed:
            await answer.send(StreamGap(count=missed))
        if not found:
            await answer.send(StreamGap(why=stream.why))
            return EndFrame(count=count)


def _checked(request: TranscriptRequest, stream: BoundedStream[TranscriptLine]) -> RunningTranscript:
    if sum(map(bool, (request.client, request.domain, request.message_id))) != 1:
        raise InvalidError("a transcript must select one client, one destination or one message")
    try:
        networks = (ip_network(request.client, strict=False),) if request.client else ()
    except ValueError as error:
        raise InvalidError(f"{request.client} is not an address or a network", pointer="/client") from error
    return RunningTranscript(
        stream,
        networks=networks,
        domain=request.domain,
        message_id=request.message_id,
        octets=request.octets,
        sessions=request.sessions,
    )


class _TailFilter:
    """The conditions that select the events of one event stream. Only the acceptance of a message names its
    sender, user and client: its later events match if the acceptance did. The constructor raises
    UnsearchableError if a value cannot be searched for.
    """

    def __init__(self, request: Tail, redactor: Redactor) -> None:
        def form(text: str) -> SearchForms | None:
            if not text:
                return None
            if is_message_id(text):
                return SearchForms(frozenset({text}))
            with contextlib.suppress(ValueError):
                text = str(ip_address(text))
            way_out = "[log] redact = false shows addresses"
            return form_of(text, redactor, clear=not redactor.enabled, place="the log", way_out=way_out)

        domain = request.domain.removeprefix("*").removeprefix("@")
        self._any = form(request.address)
        self._recipient, self._domain = form(request.recipient), form(domain and f"@{domain}")
        forms = {name: form(getattr(request, name)) for name in ("sender", "user", "client")}
        self._of_message = {name: wanted for name, wanted in forms.items() if wanted is not None}
        self._request = request
        self._messages: BoundedDict[str, None] = BoundedDict(MAX_MESSAGES)

    def __call__(self, event: str, fields: dict[str, Field]) -> bool:
        request = self._request

        def text(name: str) -> str:
            return str(fields.get(name) or "")

        def has(form: SearchForms, *names: str) -> bool:
            return any(form.matches(word) for name in names for word in text(name).split(" ") if word)

        if not self._is_of_message(event, text, has):
            return False
        domain = request.domain.lower()
        return (
            (not request.event or any(fnmatch.fnmatch(event, e.strip()) for e in request.event.split(",")))
            and (not request.zone or fnmatch.fnmatch(text("zone"), request.zone))
            and (not request.message_id or request.message_id in (text("id"), text("about")))
            and (self._recipient is None or has(self._recipient, "recipient", "to", *_mailbox(text, "RCPT")))
            and (
                self._domain is None
                or has(self._domain, "recipient", "to", *_mailbox(text, "RCPT"))
                or fnmatch.fnmatch(text("destination").lower(), domain)
            )
        )

    def _is_of_message(self, event: str, text: Callable[[str], str], has: Callable[..., bool]) -> bool:
        """Return whether the event, or the acceptance of its message, matches the sender, the user and the
        client.
        """
        if self._any is None and not self._of_message:
            return True
        message_id = text("id") or text("about")
        about = ("sender", "recipient", "to", "mailbox", "message-id", "user", "client", "id", "about")
        found = (self._any is None or has(self._any, *about)) and all(
            has(form, name, *(_mailbox(text, "MAIL", "DATA", "BDAT") if name == "sender" else ()))
            for name, form in self._of_message.items()
        )
        if found and event == "accepted":
            self._messages[message_id] = None
        return found or message_id in self._messages


def _mailbox(text: Callable[[str], str], *commands: str) -> tuple[str, ...]:
    """Return the field with the refused address, if the event is the refusal of one of these `commands`."""
    return ("mailbox",) if text("command") in commands else ()
