"""What was promised, what happened, and what must hold: the assertions of the simulation.

Safety, whatever the faults are: a message whose 250 was read is delivered, reported by a bounce, or in the
queue; nothing is delivered that was not submitted, nothing changed, nothing twice without a fault that
explains it; no recipient has two final outcomes; limits hold; suspended mail does not leave. Liveness, when
the faults have ended: the queue is empty and no task remains.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from tests.simulation.bucket import LEASE
from tests.simulation.clients import Submission
from tests.simulation.loop import Process, SimLoop
from tests.simulation.network import End, process_of
from tests.simulation.receivers import Mail, Offer
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


@dataclass
class Ledger:
    loop: SimLoop
    injected: list[Injected] = field(default_factory=list)
    suspensions: list[Suspension] = field(default_factory=list)
    dropped: set[tuple[str, str]] = field(default_factory=set)
    """Ids and recipients that an operator has dropped."""
    finals: defaultdict[tuple[str, str], list[tuple[float, str, str]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    log: list[tuple[float, str, str, Mapping[str, Field]]] = field(default_factory=list)
    sometimes: Counter[str] = field(default_factory=Counter)
    """How often each interesting thing has happened."""
    _by_tag: dict[str, Submission] = field(default_factory=dict)
    _copies: defaultdict[tuple[str, str], list[Mail]] = field(default_factory=lambda: defaultdict(list))
    _reported: set[tuple[str, str]] = field(default_factory=set)
    """Tags and recipients."""

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
        return hashlib.sha256(repr(lines).encode()).hexdigest()

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

    def places_unknown(self) -> bool:
        """A worker stood still as a new supervisor's quiet time ended, and has not said yet what it has."""
        return any(
            each.at < start.ended < each.ended + TIME_TO_SAY and self.loop.now < each.ended + TIME_TO_SAY
            for start, each in itertools.product(self._noted(NO_SUPERVISOR), self._noted(STANDSTILL))
        )

    def turns_forgotten(self, seconds: float) -> bool:
        """A worker died before it could tell a new supervisor of its turns, which bind for so long."""
        return any(
            start.at - 1.0 < each.at < start.ended and self.loop.now < start.ended + seconds
            for start, each in itertools.product(self._noted(NO_SUPERVISOR), self._noted(*DEATHS))
        )

    def taken_in_vain(self, mails: list[tuple[float, str]]) -> list[str]:
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

    # --- the judgement

    def faults(
        self,
        submissions: list[Submission],
        mails: list[Mail],
        offers: list[Offer],
        refused: set[str],
    ) -> list[str]:
        """`refused`: who was answered 5yz."""
        found: list[str] = []
        self._by_tag = {each.tag: each for each in submissions}
        for mail in mails:
            (self._judge_copy if mail.sender else self._judge_report)(mail, found)
        for submission in submissions:
            if submission.answered is not None:
                found += self._missing(submission)
        for key, mails in self._copies.items():
            submission = self._by_tag[key[0]]
            if submission.keyed or submission.answered is not None:  # else nobody was promised anything
                found += self._judge_doubles(key, mails)
        found += self._accepted_twice()
        found += self._two_outcomes(offers)
        found += self._bounced_without_a_reason(refused)
        found += self._ids_that_went_back()
        found += self._suspended(offers)
        return found

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
                excused = self._hits(process, at - SETTLED_WITHIN, at + SETTLED_WITHIN)
                if not (excused or (other != process and self._held_up(other, recipient, again, offers))):
                    found.append(
                        f"{identity} to {recipient} ended twice: {what} at {at:.3f}, {later} at {again:.3f}"
                    )
        return found

    def _held_up(self, process: str, recipient: str, until: float, offers: list[Offer]) -> bool:
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
