"""What was promised, what happened, and what must hold: the assertions of the simulation.

At every instant: limits and rates of a destination hold over all workers; a machine whose lease has ended
sends nothing of a message; no delivery is sent over two connections at once; what a worker keeps in memory is
bounded; when the faults have ended, nothing that is due waits for ever while the zone has room.

At the end, whatever the faults were: a message whose 250 was read is delivered, reported by a bounce, or in
the queue; nothing is delivered that was not submitted, nothing changed, nothing twice without a fault that
explains it; no recipient has two final outcomes; suspended mail did not leave. When the faults have ended,
the queue becomes empty and no task remains.
"""

import hashlib
import itertools
import math
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tests.simulation.bucket import LEASE, ObjectStore
from tests.simulation.clients import Clients, Submission
from tests.simulation.loop import Process, SimLoop
from tests.simulation.network import End, process_of
from tests.simulation.parts import Node
from tests.simulation.receivers import Mail, Offer, Receivers
from zonerelay.config.settings import ZoneSettings
from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.store.queue import body
from zonerelay.telemetry.events.events import Field

STANDSTILL = "stands still"
NO_SUPERVISOR = "no supervisor"
NO_BUCKET = "no bucket"
CLOCK = "clock stepped"
KILL = "kill -9"
POWER_CUT = "power cut"
DEATHS = (KILL, POWER_CUT)
DISK = {"disk full", "failing writes", "failing reads"}
"""These repeat mail only if its process ends before the outcome is written again."""
REPEATS_NOTHING = (CLOCK, NO_SUPERVISOR)
NOTICED_WITHIN = LEASE
"""Seconds: by then the lease has ended that could not be renewed (seed 2814)."""
FINAL = ("delivered", "bounced", "expired")
UNDER_WAY = 15.0
"""Seconds in which a transaction that had begun before a suspension may get as far as RCPT."""
TIME_TO_SAY = 1.5
"""Seconds in which a worker that wakes up, or whose supervisor is new, has said what it has."""
ON_ITS_WAY = 1.0
"""Seconds that bytes take to a receiver while the network is slow."""
SETTLED_WITHIN = 2.0
"""Seconds from a receiver's reply to the synced outcome, with the slowest simulated disk."""
OUTSIDE = "192.0.2."
PATIENCE = 150.0
"""Seconds for which mail may be due and its hosts not be asked: a suspension, and the watch of the clock."""
HANGS = 25.0
"""Seconds after which a connection may hang and hold the part of a zone that such hosts have."""
HARMLESS = (b"QUIT", b"EHLO", b"HELO", b"NOOP")
"""What a relay may say that has lost its lease: nothing of a message."""
_TAG = re.compile(rb"(?m)^X-Tag: (\S+)\r\n")
_FAILED = re.compile(rb"(?mi)^Final-Recipient: rfc822; ?(\S+)\r\n(?:.+\r\n)*?Action: failed")


@dataclass
class Injected:
    """A fault that may repeat mail: it hit `process` (every one, if that is empty) at this time."""

    at: float
    process: str
    what: str
    ended: float


@dataclass
class Suspension:
    """`about` is a pattern of the suspended recipients or senders, as `*@d1.fast.test`."""

    about: str
    begun: float
    by_sender: bool = False
    ended: float | None = None

    def concerns(self, sender: str, recipient: str) -> bool:
        return fnmatchcase(sender if self.by_sender else recipient, self.about)


class Ledger:
    """`window` is how many deliveries of a zone may be in memory. Nodes that share the bucket `objects` have
    the limits each for itself.
    """

    def __init__(
        self, loop: SimLoop, zone: ZoneSettings, workers: int, window: int, objects: ObjectStore | None
    ) -> None:
        self.loop, self.zone, self.workers, self.window, self.objects = loop, zone, workers, window, objects
        self.injected: list[Injected] = []
        self.suspensions: list[Suspension] = []
        self.dropped: set[tuple[str, str]] = set()
        """Ids and recipients that an operator has dropped."""
        self.finals: defaultdict[tuple[str, str], list[tuple[float, str, str]]] = defaultdict(list)
        self.log: list[tuple[float, str, str, Mapping[str, Field]]] = []
        self.sometimes: Counter[str] = Counter()
        """How often each interesting thing has happened."""
        self.asked: dict[str, float] = {}
        """When a host was connected to last, or a transaction with it began."""
        self._by_tag: dict[str, Submission] = {}
        self._copies: defaultdict[tuple[str, str], list[Mail]] = defaultdict(list)
        self._reported: set[tuple[str, str]] = set()
        """Tags and recipients."""
        self._open: Counter[str] = Counter()
        self._spoke: defaultdict[str, deque[float]] = defaultdict(deque)
        self._due_since: dict[DeliveryKey, float] = {}
        self._full_at = 0.0
        self._began: dict[End, float] = {}
        """When a connection outside began."""

    def record(self, process: Process, event: str, fields: Mapping[str, Field]) -> None:
        self.log.append((self.loop.now, process.name, event, fields))
        self.sometimes[event] += 1
        if event == "dropped":
            self.dropped.add((str(fields["id"]), str(fields["recipient"])))
        if event in FINAL:
            key = str(fields["id"]), str(fields["recipient"])
            self.finals[key].append((self.loop.now, process.name, event))

    def digest(self) -> str:
        """Return a digest of the log and its times, without the ports and paths chosen by the system."""
        lines = [
            (*entry, sorted(item for item in fields.items() if item[0] not in ("listeners", "from")))
            for *entry, fields in self.log
        ]
        return hashlib.sha256(re.sub(r"/tmp\w+", "", repr(lines)).encode()).hexdigest()

    def inject(self, what: str, process: str = "", *, lasts: bool = False) -> Injected:
        """Note a fault. One that `lasts` is over when its `ended` is set."""
        now = self.loop.now
        self.injected.append(Injected(now, process, what, math.inf if lasts else now))
        self.log.append((now, process or "world", f"FAULT {what}", {}))
        return self.injected[-1]

    def _noted(self, *kinds: str) -> list[Injected]:
        return [each for each in self.injected if each.what in kinds]

    def _hits(self, process: str, start: float, stop: float) -> set[str]:
        """The faults that may repeat mail and met the process in this time."""
        return {
            each.what
            for each in self.injected
            if each.at <= stop
            and each.ended >= start
            and each.process in ("", process)
            and not each.what.startswith(REPEATS_NOTHING)
        }

    def _places_unknown(self) -> bool:
        """A worker stood still as a new supervisor's quiet time ended, and has not said yet what it has."""
        return any(
            each.at < start.ended < each.ended + TIME_TO_SAY and self.loop.now < each.ended + TIME_TO_SAY
            for start, each in itertools.product(self._noted(NO_SUPERVISOR), self._noted(STANDSTILL))
        )

    def _turns_forgotten(self, seconds: float) -> bool:
        """A worker died before it could tell a new supervisor of its turns, which bind for so long."""
        return any(
            start.at - 1.0 < each.at < start.ended and self.loop.now < start.ended + seconds
            for start, each in itertools.product(self._noted(NO_SUPERVISOR), self._noted(*DEATHS))
        )

    def _taken_in_vain(self, mails: list[tuple[float, str]]) -> list[str]:
        """A relay that cannot reach the store answers 451 to MAIL, once it has noticed; it notices nothing
        while it stands still. `mails`: when MAIL was accepted, and by which node.
        """
        return [
            f"MAIL was answered 250 at {at:.3f}, and there is no bucket since {each.at:.3f}"
            for each, (at, node) in itertools.product(self._noted(NO_BUCKET), mails)
            if each.at + NOTICED_WITHIN < at < each.ended
            and not any(
                still.process.startswith(f"{node}.") and still.at < at < still.ended + NOTICED_WITHIN
                for still in self._noted(STANDSTILL)
            )
        ]

    def _fail(self, what: str) -> None:
        self.loop.failures.append(f"{what} at {self.loop.now:.3f}")

    # --- connections and rates

    def opened(self, end: End) -> None:
        if end.link.address.startswith(OUTSIDE):
            self._began[end] = self.loop.now
            self._count(end, 1)

    def closed(self, end: End) -> None:
        if not end.is_server and end.link.address.startswith(OUTSIDE):
            self._began.pop(end, None)
            self._count(end, -1)

    def _sharing(self, end: End) -> str:
        """Workers of one machine share the limits, nodes on a bucket have them each."""
        process = process_of(end)
        return process.name if self.objects is not None and process is not None else "all"

    def _count(self, end: End, by: int) -> None:
        """Connections that the relay has, over all workers."""
        who, address = self._sharing(end), end.link.address
        zone = f"{who} zone"
        self._open[f"{who} {address}"] += by
        self._open[zone] += by
        if self._open[zone] >= self.zone.max_connections:
            self._full_at = self.loop.now
        if by < 0:
            return
        # Nobody knows what a worker has that stands still while a new supervisor asks: at most its limit.
        times = self.workers if self._places_unknown() else 1
        for what, most in (
            (f"{who} {address}", self.zone.max_connections_per_destination),
            (zone, self.zone.max_connections),
        ):
            if self._open[what] == most and times == 1 and who == "all" and self.workers > 1:
                self.sometimes["workers used a limit up"] += 1
            if self._open[what] > most * times:
                self._fail(f"{self._open[what]} connections of {what}")

    def written(self, end: End, data: bytes) -> None:
        """Called with all that is written to a connection, by both sides."""
        if end.is_server or not end.link.address.startswith(OUTSIDE):
            return
        process = process_of(end)
        if process is None:
            return
        if not data.startswith(HARMLESS) and data != b"RSET\r\n" and not self._has_lease(process):
            self._fail(f"{process.name} sent {data[:30]!r} without a lease")
        if data.startswith((b"MAIL ", b"RSET")) and b"MAIL FROM" in data:
            self.asked[end.link.address.partition(":")[0]] = self.loop.now
            self._check_rate(end, process)

    def _check_rate(self, end: End, process: Process) -> None:
        rate = self.zone.max_rate_per_destination
        if rate is None:
            return
        # A start forgets what was used, where no supervisor knows it.
        who = f"{process.name if self.workers == 1 else self._sharing(end)} {end.link.address}"
        recent = self._spoke[who]
        recent.append(self.loop.now)
        while recent[0] <= self.loop.now - rate.seconds:
            recent.popleft()
        if len(recent) == rate.count:
            self.sometimes["a rate was used up"] += 1
        if len(recent) > rate.count and not self._turns_forgotten(rate.seconds):
            self._fail(f"{len(recent)} transactions in {rate.seconds} s with {who}")

    # --- leases

    def _has_lease(self, process: Process) -> bool:
        """By what others can see in the bucket, which is no earlier than what the process believes."""
        if self.objects is None:
            return True
        return self.loop.now <= self.objects.renewed.get(process.name, 0.0) + LEASE

    def sent_at_once(self, end: End, first: End, recipient: str) -> None:
        """A recipient was offered on `end` while a transaction for it is under way on `first`."""
        mine, other = process_of(end.other), process_of(first.other)
        if mine is None or other is None or first.other.closed or first.link.broken:
            return
        # What began under a lease that has ended goes on, although there is another lease now.
        lapsed = 0.0 if self.objects is None else self.objects.lapsed.get(other.name, 0.0)
        if self._began.get(first.other, self.loop.now) < lapsed:
            return
        if other.alive and not other.still and self._has_lease(other):
            self._fail(f"{recipient} was offered by {mine.name}, and {other.name} was sending it,")

    # --- memory

    def look_into(self, node: Node) -> None:
        """What a worker has in memory does not depend on how much is queued."""
        worker = node.worker
        if worker is None or not node.is_up:
            return
        for zone in worker.scheduler._zones.values():
            if zone.plan.window.waiting >= self.window - 1:
                self.sometimes["the window was full"] += 1
            if zone.plan.window.waiting > self.window:
                self._fail(f"{zone.plan.window.waiting} deliveries wait in the memory of {node.name}")
        bodies = getattr(worker.store, "_bodies", None)
        if bodies is not None and bodies._size > body.CAPACITY:
            self._fail(f"{bodies._size} octets of bodies are in the memory of {node.name}")

    # --- starvation, when the faults are over

    def look_at(self, due: Iterable[Delivery], hosts_of: Callable[[str], str]) -> None:
        """`due` is all that is due now, in every store."""
        now, before = self.loop.now, self._due_since
        self._due_since = {}
        if any(began < now - HANGS for began in self._began.values()):
            self._full_at = now
            self.sometimes["a connection held up the zone"] += 1
        for each in due:
            since = self._due_since[each.key] = before.get(each.key, now)
            host = hosts_of(each.domain)
            if now - max(since, self.asked.get(host, 0.0), self._full_at) > PATIENCE:
                self._fail(f"{each.recipient} has been due for {now - since:.0f} s, and nobody asked {host},")
                self._full_at = now

    # --- the judgement at the end

    def faults(self, clients: Clients, receivers: Receivers) -> list[str]:
        found: list[str] = []
        self._by_tag = {each.tag: each for each in clients.submissions}
        for mail in receivers.mails:
            (self._judge_copy if mail.sender else self._judge_report)(mail, found)
        for submission in clients.submissions:
            if submission.answered is not None:
                found += self._missing(submission)
        for key, mails in self._copies.items():
            submission = self._by_tag[key[0]]
            if submission.keyed or submission.answered is not None:  # else nobody was promised anything
                found += self._judge_doubles(key, mails)
        return [
            *found,
            *self._accepted_twice(),
            *self._two_outcomes(receivers.offers),
            *self._bounced_without_a_reason(receivers.refused),
            *self._ids_that_went_back(),
            *self._suspended(receivers.offers),
            *self._taken_in_vain(clients.mails_accepted),
        ]

    def _accepted_twice(self) -> list[str]:
        """Messages with an idempotency key that have two queue ids."""
        ids: defaultdict[str, set[str]] = defaultdict(set)
        for _, _, event, fields in self.log:
            if event == "accepted":
                ids[str(fields["sender"])].add(str(fields["id"]))
        return [
            f"{each.tag} was accepted as {' and '.join(sorted(ids[each.sender]))}, with one idempotency key"
            for each in self._by_tag.values()
            if each.keyed and len(ids[each.sender]) > 1
        ]

    def _suspended(self, offers: list[Offer]) -> list[str]:
        """Suspended mail that was offered all the same. What was under way may go on."""
        return [
            f"{offer.recipient} was offered at {offer.at:.3f}, {each.about} was suspended"
            f" from {each.begun:.3f} to {each.ended:.3f}"
            for each, offer in itertools.product(self.suspensions, offers)
            if each.ended is not None
            and each.begun + UNDER_WAY < offer.at < each.ended
            and each.concerns(offer.sender, offer.recipient)
            and not self._stood_still(offer.end, each.begun, offer.at)
        ]

    def _stood_still(self, end: End, begun: float, at: float) -> bool:
        """A standstill of the process held up what was under way."""
        process = process_of(end.other)
        return process is not None and any(
            each.process == process.name and each.at <= begun + UNDER_WAY and at <= each.ended + UNDER_WAY
            for each in self._noted(STANDSTILL)
        )

    def _judge_copy(self, mail: Mail, found: list[str]) -> None:
        tag = _TAG.search(mail.body)
        submission = self._by_tag.get(tag[1].decode()) if tag else None
        if submission is None or not submission.dot_sent:
            found.append(f"{mail.recipient} got mail that was not submitted: {mail.body[:200]!r}")
            return
        if mail.recipient not in submission.recipients:
            found.append(f"{submission.tag} went to {mail.recipient}, who is none of its recipients")
        if original(mail.body) != submission.body:
            found.append(f"{submission.tag} was changed on its way to {mail.recipient}")
        if mail.sender != submission.sender:
            found.append(f"{submission.tag} had the sender {mail.sender}")
        self._copies[submission.tag, mail.recipient].append(mail)

    def _judge_report(self, mail: Mail, found: list[str]) -> None:
        tag = _TAG.search(mail.body)
        # Without the headers of the message, which the disk did not give: each message has its own sender.
        name = tag[1].decode() if tag else mail.recipient.partition("@")[0].replace("s", "t")
        submission = self._by_tag.get(name)
        if submission is None or not submission.dot_sent:
            found.append(f"a report about mail that was not submitted: {mail.body[:300]!r}")
            return
        if mail.recipient != submission.sender:
            found.append(f"the report about {submission.tag} went to {mail.recipient}")
        for failed in _FAILED.finditer(mail.body):
            self._reported.add((submission.tag, failed[1].decode()))

    def _missing(self, submission: Submission) -> list[str]:
        return [
            f"{submission.tag} to {each} was accepted at {submission.answered:.3f} by {submission.node}"
            f" as {submission.identity}, and is neither delivered nor reported"
            for each in submission.accepted
            if (submission.tag, each) not in self._copies
            and (submission.tag, each) not in self._reported
            and (submission.identity, each) not in self.dropped
            and not self._report_failed(submission, each)
        ]

    def _report_failed(self, submission: Submission, recipient: str) -> bool:
        """A final outcome was stored, and its report could not be delivered either."""
        failed = {key for key, ended in self.finals.items() if any(what != "delivered" for *_, what in ended)}
        return (submission.identity, recipient) in failed and any(to == submission.sender for _, to in failed)

    def _judge_doubles(self, key: tuple[str, str], mails: list[Mail]) -> list[str]:
        found = []
        for mail, later in itertools.pairwise(mails):
            process = process_of(mail.end.other)
            name = "" if process is None else process.name
            if mail.replied is None or mail.end.link.broken:
                continue
            # From the final dot on its way to the outcome that is stored.
            begun, settled = mail.at - ON_ITS_WAY, mail.replied + SETTLED_WITHIN
            met = self._hits(name, begun, settled)
            if met and met <= DISK:
                met = self._hits(name, begun, later.at) - DISK
            if not met:
                found.append(
                    f"{key[0]} came to {key[1]} twice, at {mail.at:.3f} from {name} and at {later.at:.3f}"
                )
        return found

    def _bounced_without_a_reason(self, refused: set[str]) -> list[str]:
        """Only a 5yz, age and an operator end a delivery without success."""
        return [
            f"{fields['recipient']} was bounced at {at:.3f}, and nobody refused it: {fields['reply']}"
            for at, _, event, fields in self.log
            if event == "bounced"
            and (
                not str(fields["reply"]).startswith("5")
                or (fields.get("peer") and fields["recipient"] not in refused)
            )
        ]

    def _ids_that_went_back(self) -> list[str]:
        """Ids of a process that are not above those of the earlier processes on the same spool."""
        found: list[str] = []
        highest: dict[str, dict[str, str]] = {}
        for at, process, event, fields in self.log:
            if event == "accepted":
                processes = highest.setdefault(process.partition(".")[0], {})
                identity = str(fields["id"])
                processes[process] = max(processes.get(process, ""), identity)
                # Behind a lost partition ids are those of another one, with another suffix.
                if any(
                    name != process and identity[-2:] == last[-2:] and identity <= last
                    for name, last in processes.items()
                ):
                    found.append(f"{process} accepted {identity} at {at:.3f}, below the ids of its last run")
        return found

    def _two_outcomes(self, offers: list[Offer]) -> list[str]:
        found = []
        for (identity, recipient), ended in self.finals.items():
            for (at, process, what), (again, other, later) in itertools.pairwise(ended):
                excused = bool(self._hits(process, at - SETTLED_WITHIN, at + SETTLED_WITHIN))
                if other != process:  # the first may have lost its lease during its transaction, too
                    pairs = ((other, again), (process, at))
                    excused = excused or any(self._held_up(*each, recipient, offers) for each in pairs)
                if not excused:
                    found.append(
                        f"{identity} to {recipient} ended twice: {what} at {at:.3f}, {later} at {again:.3f}"
                    )
        return found

    def _held_up(self, process: str, until: float, recipient: str, offers: list[Offer]) -> bool:
        """The process logged an outcome that it could not store: a fault met its transaction, or it notices
        only now what it has missed.
        """
        return bool(self._hits(process, until - LEASE, until)) or any(
            offer.recipient == recipient
            and (owner := process_of(offer.end.other)) is not None
            and owner.name == process
            and bool(self._hits(process, offer.at - ON_ITS_WAY, until))
            for offer in offers
            if offer.at < until
        )


def original(body: bytes) -> bytes:
    """The message without what the relay has put in front of it."""
    start = body.find(b"X-Begin: 1\r\n")
    return body[start:] if start >= 0 else body
