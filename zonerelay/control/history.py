"""Searches the history and builds timelines of messages, for the command line, the API and the page. Each
answer includes the gaps of the history.
"""

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import structs

from zonerelay.config.credentials.file import CredentialsError, read
from zonerelay.config.settings import HistoryAddresses, Settings
from zonerelay.history import reader
from zonerelay.history.reader import Histories, HistoryEntry, HistoryGap, steps
from zonerelay.history.writer import DIRECTORY
from zonerelay.model.envelope import Mailbox
from zonerelay.operations.errors import BusyError
from zonerelay.operations.requests import HistoryFind, QueueShow, Resolve
from zonerelay.process.setup import redact_key_of
from zonerelay.process.threads import HISTORY, LOOKUPS, PoolBusyError
from zonerelay.store.spool_paths import is_shared
from zonerelay.telemetry.events.records import TraceStep
from zonerelay.telemetry.logs.redact import Redactor, SearchForms, UnsearchableError, form_of, load_key

LONGEST = 15.0
"""Seconds for one question to a running relay."""
LONGEST_COMMAND = 120.0
"""Seconds for a search of the command line, which reads the files itself."""
MAX_GAPS = 5
"""Told one by one."""
MAX_KNOWN = 1000
TOGETHER = 100
"""Pseudonyms in one request."""
MAX_QUEUED = 50
"""Messages that the queue is asked about for one search."""

_PSEUDONYM = re.compile(r"u-[a-z2-7]{13}@d-[a-z2-7]{13}")


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a search in the history, in chronological order. `more` means that there are older
    entries. `gaps` are the times that the history does not cover. `refused_more` is the number of refusals
    that were counted but not stored. `other_machines` means that other relays share the queue and were not
    searched.
    """

    found: tuple[HistoryEntry, ...]
    more: bool
    gaps: tuple[HistoryGap, ...]
    refused_more: int
    workers: tuple[int, ...]
    other_machines: bool


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """The timeline of one message: its known events in chronological order. They are empty if the history
    does not contain the message, perhaps because of its `gaps`.
    """

    steps: tuple[TraceStep, ...]
    gaps: tuple[HistoryGap, ...]
    workers: tuple[int, ...]


T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)


async def ask(question: Callable[..., T], /, *given: object) -> T:
    """Run a search of `HistorySearch` in a thread. Raise BusyError if too many questions are asked or the
    time is over; a search then raises UnsearchableError.
    """
    pool = HISTORY if getattr(question, "__func__", None) is HistorySearch.search else LOOKUPS
    try:
        return await pool.run(question, *given)
    except PoolBusyError:
        raise BusyError("too many requests to the history are being processed; try again") from None
    except reader.TooLongError:
        raise BusyError(f"the history did not respond within {LONGEST:g} s; try again") from None


AskRelay = Callable[[Iterable[QueueShow | Resolve]], Awaitable[list[str]]]
"""Returns the addresses in a relay's answers to `questions`."""


def redactor_of(settings: Settings) -> Redactor | None:
    """Return the object that makes pseudonyms with the relay's key, or `None` if there is no key. Raise
    RedactKeyError if the key cannot be read.
    """
    key = load_key(redact_key_of(settings))
    return None if key is None else Redactor(key, enabled=True)


def form(value: str, settings: Settings, redactor: Redactor | None) -> SearchForms:
    """Return the forms in which the history may contain a value, such as its pseudonym. Raise
    UnsearchableError if there is none.
    """
    return form_of(value, redactor, clear=settings.history.addresses is HistoryAddresses.CLEAR)


class HistorySearch(msgspec.Struct, frozen=True):
    """Searches the histories of this machine as of the time `now`. Each blocks for at most `longest` seconds
    and then raises TooLongError; it raises RedactKeyError if the key of the pseudonyms cannot be read.
    """

    settings: Settings
    now: float
    longest: float | None = LONGEST

    async def found(
        self, wanted: HistoryFind, known: Sequence[str] = (), relay: AskRelay | None = None
    ) -> SearchResult:
        """Search the history in a thread, and replace pseudonyms by the `known` addresses and those that the
        relay knows.
        """
        answer = await ask(self.search, wanted)
        more = [] if relay is None else await relay(questions(answer.found))
        names = await ask(self.pseudonyms, [*known, *more])
        return structs.replace(answer, found=named(answer.found, names))

    async def line(
        self, message_id: str, known: Sequence[str] = (), relay: AskRelay | None = None
    ) -> Timeline:
        """Read the timeline of a message in a thread, and replace the pseudonyms that the relay knows."""
        if relay is not None:
            known = [*known, *await relay(questions(await ask(self.entries, message_id)))]
        return await ask(self.time_line, message_id, known)

    def search(self, wanted: HistoryFind) -> SearchResult:
        """Search the history of all workers. Raise UnsearchableError if that is not possible or takes too
        long.
        """
        texts = {each: getattr(wanted, each) for each in ("sender", "recipient", "client", "user")}
        try:
            with self._open(self.longest or LONGEST_COMMAND) as histories:
                query = reader.Query(
                    **self._forms(histories, any=wanted.about, **texts),
                    zone=wanted.zone,
                    destination=wanted.destination,
                    reply=wanted.reply,
                    outcome=wanted.outcome or "",
                    since=wanted.since,
                    until=float("inf") if wanted.until is None else wanted.until,
                )
                found, more = histories.find(query, wanted.limit)
                users = self._users(histories.redactor, (each.user for each in found))
                return SearchResult(
                    found=tuple(
                        msgspec.structs.replace(each, user=users.get(each.user, each.user)) if users else each
                        for each in found
                    ),
                    more=more,
                    gaps=tuple(histories.gaps(query.since, min(query.until, self.now))),
                    refused_more=histories.refused_more(query),
                    workers=tuple(histories.workers),
                    other_machines=is_shared(self.settings.spool),
                )
        except reader.TooLongError:
            raise UnsearchableError(
                f"the search was aborted after {self.longest or LONGEST_COMMAND:g} s; search for an address "
                "or a message id, which are indexed, or for a shorter period (since)"
            ) from None

    def time_line(self, message_id: str, known: Sequence[str] = ()) -> Timeline:
        """Return the timeline of a message, with the `known` addresses in place of their pseudonyms."""
        with self._open(self.longest) as histories:
            records = histories.records(message_id)
            users = self._users(histories.redactor, (each.text("user") for each in records))
            lines = steps(records, message_id, users)
            accepted = int(message_id[:11], 16) / 1000
            gaps, workers = tuple(histories.gaps(accepted, self.now)), tuple(histories.workers)
            names = self.pseudonyms(known[:MAX_KNOWN])
            return Timeline(steps=named(lines, names), gaps=gaps, workers=workers)

    def entries(self, message_id: str, user: str | None = None) -> list[HistoryEntry]:
        """Return the outcomes of a message, one per recipient in the order of its envelope. Raise
        UnsearchableError.
        """
        with self._open(self.longest) as histories:
            found = reader.entries_of(message_id, histories.records(message_id))
            own = None if user is None else form(user, self.settings, histories.redactor)
            return [
                each
                for each in found
                if each.outcome != "refused" and (own is None or own.matches(each.user))
            ]

    def sent(
        self, query: reader.Query, user: str | None, recipient: str, limit: int
    ) -> list[reader.SentMessage]:
        """Return the messages that match a query, newest first. Raise UnsearchableError."""
        with self._open(self.longest) as histories:
            forms = self._forms(histories, user=user, recipient=recipient or None)
            return histories.sent(structs.replace(query, **forms), limit)

    def became(self, message_id: str) -> str:
        """Describe the outcome of a message that has left the queue, or return "" if it is not known. Raise
        UnsearchableError if the search is not possible.
        """
        outcomes = Counter(each.outcome for each in self.entries(message_id))
        if not outcomes:
            return ""
        lines = ", ".join(
            f"{'' if count == 1 else f'{count} '}{outcome}" for outcome, count in outcomes.items()
        )
        return f"message {message_id} has left the queue: {lines}"

    def pseudonyms(self, addresses: Iterable[str]) -> dict[str, str]:
        """Return a dictionary from the pseudonyms of these addresses to the addresses."""
        redactor = redactor_of(self.settings)
        return {} if redactor is None else {redactor.mailbox(Mailbox(each)): each for each in addresses}

    def _open(self, longest: float | None) -> Histories:
        directory = self.settings.spool.path.parent / DIRECTORY
        return Histories(directory, redactor_of(self.settings), self.now, longest=longest)

    def _forms(self, histories: Histories, **values: str | None) -> dict[str, Any]:
        """Return, for each value that is not None, the forms in which the history may contain it."""
        given = {name: value for name, value in values.items() if value is not None}
        return {name: form(value, self.settings, histories.redactor) for name, value in given.items()}

    def _users(self, redactor: Redactor | None, stored: Iterable[str]) -> dict[str, str]:
        """Return a dictionary from pseudonyms to user names, for the users whose names are addresses. The
        credentials are read only if one of the `stored` names is a pseudonym, because there may be 100,000.
        """
        if redactor is None or not any(map(_PSEUDONYM.fullmatch, stored)):
            return {}
        try:
            names = read(self.settings.auth.credentials)
        except CredentialsError:
            return {}
        return {redactor.user(name): name for name in names if "@" in name}


def continued(lines: Timeline, queued: Sequence[TraceStep]) -> list[TraceStep]:
    """Return the events of a message in the history, followed by the next steps that the queue reports."""
    if not any(each.event in ("accepted", "is-report") for each in lines.steps):
        return list(queued)  # the queue knows the acceptance and the last attempt
    later = [each for each in queued if each.event not in ("accepted", "settled", "attempt")]
    return [*lines.steps, *later]


def questions(found: Iterable[HistoryEntry]) -> list[QueueShow | Resolve]:
    """Return requests to the relay for the addresses behind pseudonyms in these entries."""
    entries = list(found)
    texts = [text for each in entries for text in (each.sender, each.recipient, each.user, each.reply)]
    names = list(dict.fromkeys(name for text in texts for name in _PSEUDONYM.findall(text)))[-MAX_KNOWN:]
    parts = [" ".join(names[at : at + TOGETHER]) for at in range(0, len(names), TOGETHER)]
    asked = [Resolve(pseudonym=each, recent=True, limit=2 * TOGETHER) for each in parts]
    queued = dict.fromkeys(each.message_id for each in entries if each.outcome in ("waiting", "deferred"))
    return [*asked, *(QueueShow(message_id=each) for each in list(queued)[-MAX_QUEUED:])]


def named(rows: Iterable[S], names: Mapping[str, str]) -> tuple[S, ...]:
    """Return these rows with pseudonyms replaced by the addresses in `names`."""

    def clear(text: str) -> str:
        return _PSEUDONYM.sub(lambda found: names.get(found[0], found[0]), text)

    def cleared(row: S) -> S:
        texts = msgspec.structs.asdict(row).items()
        return msgspec.structs.replace(row, **{k: clear(text) for k, text in texts if isinstance(text, str)})

    return tuple(map(cleared, rows)) if names else tuple(rows)


def of_interest(answer: SearchResult, *, asked: bool) -> list[HistoryGap]:
    """Return the gaps in the history that are worth reporting. That the history does not reach further back
    matters only if nothing was found, or if that time was `asked` for.
    """
    return [
        gap for gap in answer.gaps if gap.began is not None or gap.ended is None or asked or not answer.found
    ]


def in_words(gaps: Sequence[HistoryGap], when: Callable[[float], str], *, several: bool) -> list[str]:
    """Describe each gap in a sentence, which names the worker if there are `several`."""
    lines = []
    for gap in gaps[:MAX_GAPS]:
        began = "the beginning" if gap.began is None else when(gap.began)
        ended = "now" if gap.ended is None else when(gap.ended)
        span = "" if gap.began is gap.ended is None else f"from {began} to {ended}: "
        lines.append(f"{f'worker {gap.worker}: ' if several else ''}{span}{gap.why}")
    if len(gaps) > MAX_GAPS:
        lines.append(f"and {len(gaps) - MAX_GAPS} more periods (listed by zonerelay log find --json)")
    return lines
