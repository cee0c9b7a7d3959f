"""All webhooks of a worker: creates events about outcomes, acceptances and the relay itself, and owns the
couriers that post them.

Promise: the results of `outcomes` and `accepted` belong in the same write as what they report, so a crash
loses both or neither. Events of the relay itself (`tell`) are kept only in memory, because most describe the
present, and one reports that the spool cannot be written.

A webhook that the configuration no longer names has no courier; its events are removed from the spool, with a
log line.
"""

import asyncio
import contextlib
import itertools
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime
from functools import partial
from random import Random

import msgspec
from msgspec import structs

from zonerelay.config.settings import WebhookAddresses, WebhookSettings, webhook_keys
from zonerelay.model.clock import Clock
from zonerelay.model.delivery import Delivery, DeliveryKey, QueueKind, webhook_queue
from zonerelay.model.envelope import (
    NULL_SENDER,
    Envelope,
    Mailbox,
    Message,
    MessageIdSource,
    Origin,
    Recipient,
)
from zonerelay.model.reply import Verdict
from zonerelay.process.tasks import in_slices
from zonerelay.process.threads import REPORTS
from zonerelay.store.contract import CHUNK_SIZE, Finish, OwnMessage, QueueStore, StoreError
from zonerelay.telemetry.events.events import Events, Field, Result, accepted_fields, attempt_fields
from zonerelay.telemetry.logs.redact import Redactor
from zonerelay.webhook.courier import GAP, EventPosition, WebhookCourier, Write

PROTOCOL = "webhook"
RECIPIENTS = 50
"""In one event message.accepted, so that it stays below 20 kB."""
LONGEST = 500
"""Characters of one text of a stranger."""
AT_ONCE = 100
"""Events that a replay puts into one write."""

_Record = tuple[float, str, Mapping[str, Field]]
"""An event of the history."""

_encode = msgspec.json.Encoder().encode


@dataclass(eq=False, repr=False)
class Webhooks:
    """Creates the events of all webhooks of a worker, and manages their couriers. Call `start`, then `close`
    once. `hashed` makes pseudonyms. `records` reads the history since a time, with the acceptances of the
    messages concerned, in a thread.
    """

    _: KW_ONLY
    hostname: str
    store: QueueStore
    write: Write
    ids: MessageIdSource
    hashed: Callable[[], Redactor]
    records: Callable[[float], Sequence[_Record]]
    environment: Mapping[str, str]
    events: Events
    clock: Clock
    random: Random

    def __post_init__(self) -> None:
        self._couriers: dict[str, WebhookCourier] = {}
        self._alike: Sequence[Sequence[WebhookCourier]] = ()
        self.events.tell_webhooks = self.tell

    async def configure(self, settings: Sequence[WebhookSettings]) -> None:
        """Apply new [[webhook]] settings. If a secret cannot be read, the events of its webhook wait until it
        can. A reload has read the secrets before.
        """
        keys: dict[str, Sequence[str]] = {}
        unread: dict[str, str] = {}
        for each in settings:
            try:
                keys[each.name] = webhook_keys(each, self.environment)
            except ValueError as error:
                keys[each.name], unread[each.name] = (), str(error)
        wanted = {each.name: each for each in settings}
        metrics = self.events.metrics
        if settings:
            metrics.webhooks.attach(
                lambda: {"zonerelay_webhook_queued": {each.name: each.queued for each in self.couriers()}}
            )
            metrics.webhook_events.declare(
                (name, result) for name in wanted for result in ("delivered", "failed", "lost")
            )
        # New couriers create events from now on, and claim those that old ones have released.
        old, self._couriers = self._couriers, {}
        for name, each in wanted.items():
            same = name in old and (old[name].settings, old[name].keys) == (each, keys[name])
            self._couriers[name] = old.pop(name) if same else self._courier(each, keys[name])
            if each.addresses is not WebhookAddresses.CLEAR:
                self._couriers[name].redact = self.hashed()
            if name in unread:
                self._couriers[name].note(unread[name])
        alike: dict[object, list[WebhookCourier]] = {}
        for courier in self._couriers.values():
            alike.setdefault((courier.settings.addresses, courier.settings.events), []).append(courier)
        self._alike = tuple(alike.values())
        for courier in old.values():
            await courier.stop()
        for courier in self._couriers.values():
            if courier.is_disabled:
                courier.retry()
            courier.start()
        with contextlib.suppress(StoreError):  # the next start forgets them
            await self._forget_others()

    def _courier(self, settings: WebhookSettings, keys: Sequence[str]) -> WebhookCourier:
        def make_gap(count: int, why: str, first: float, last: float) -> OwnMessage:
            data: dict[str, Field] = {"lost": count, "why": why, "first": _iso(first), "last": _iso(last)}
            return self._submit([settings.name], GAP, count, [("webhook.gap", self.clock.now(), data)], first)

        return WebhookCourier(
            settings,
            keys,
            read_keys=partial(webhook_keys, settings, self.environment),
            store=self.store,
            write=self.write,
            make_gap=make_gap,
            events=self.events,
            clock=self.clock,
            random=self.random,
        )

    async def _forget_others(self) -> None:
        for queue in await self.store.queues():
            if queue.kind is not QueueKind.WEBHOOK:
                continue
            name, count = queue.zone, 0
            while name not in self._couriers:
                found = await self.store.claim(queue, AT_ONCE, now=self.clock.now())
                if not found:
                    break
                count += sum(EventPosition.read(each.recipient).events for each in found)
                await self.store.settle([Finish(each) for each in found])
            if count:
                self.events.webhook_lost(name, count, "no [[webhook]] has this name any longer")

    async def close(self) -> None:
        """Stop the couriers, while the store still accepts writes. Events are still created, and posted after
        the next start.
        """
        await asyncio.gather(*(courier.stop() for courier in self._couriers.values()))

    # Events

    def stored(self, deliveries: Sequence[Delivery], is_next: bool) -> int:
        """Pass new events, which the store has just made durable, to their couriers
        (`store.contract.Stored`).
        """
        courier = self._couriers.get(deliveries[0].zone)
        return 0 if courier is None else courier.stored(deliveries, is_next)

    def notify(self) -> None:
        """Look for events in the store that other workers have created."""
        for courier in self._couriers.values():
            courier.notify()

    def forget(self, keys: Collection[DeliveryKey]) -> None:
        """Drop queued events that another relay has taken over and posts."""
        for courier in self._couriers.values():
            courier.forget(keys)
        self.store.release(keys)

    def outcomes(
        self, message: Message | None, reported: Sequence[Result], destination: str, seconds: float | None
    ) -> list[OwnMessage]:
        """Return the events about these outcomes, to be stored in the same write."""
        named = [(_type_of(each), each) for each in reported]
        found: list[OwnMessage] = []
        for couriers in self._asking({name for name, _ in named}):
            wanted = [each for name, each in named if self._wants(couriers[0], name)]
            for _, group in itertools.groupby(wanted, key=lambda each: each[0].message_id):
                found.append(self._outcomes(couriers, message, list(group), destination, seconds))
        return found

    def _outcomes(
        self,
        couriers: Sequence[WebhookCourier],
        message: Message | None,
        reported: Sequence[Result],
        destination: str,
        seconds: float | None,
    ) -> OwnMessage:
        redact, now = couriers[0].redact, self.clock.now()
        about: dict[str, object] = {}
        if message is not None:
            about["sender"] = redact.mailbox(message.envelope.sender)
            about |= _labels(message, redact)
            if message.envelope.origin.user:
                about["user"] = redact.user(message.envelope.origin.user)
        events = []
        for each in reported:
            delivery, outcome, next_attempt = each
            age = max(now - delivery.created, 0.0)
            fields = attempt_fields(delivery, outcome, next_attempt, destination, age, seconds)
            fields["recipient"] = redact.mailbox(delivery.recipient)
            fields["reply"] = redact.about(str(outcome.reply), delivery.recipient)
            events.append((_type_of(each), now, fields | about))
        names = [each.name for each in couriers]
        submit = self._submit(names, reported[0][0].message_id, 1, events)
        return structs.replace(submit, about=tuple(each[0].key for each in reported))

    def accepted(self, message: Message) -> list[OwnMessage]:
        """Return the events about an accepted message, to be stored in the same write. An error here must not
        lose the message.
        """
        try:
            at = message.envelope.created
            return [
                self._submit(
                    [each.name for each in couriers],
                    message.id,
                    0,
                    [("message.accepted", at, self._accepted(couriers[0], message))],
                )
                for couriers in self._asking({"message.accepted"})
            ]
        except Exception as error:  # noqa: BLE001 - see above
            self.events.error("webhook", error, message_id=message.id)
            return []

    def _accepted(self, courier: WebhookCourier, message: Message) -> dict[str, object]:
        redact, recipients = courier.redact, message.envelope.recipients
        # Beyond `RECIPIENTS`, only the number of recipients is included.
        envelope = structs.replace(message.envelope, recipients=recipients[:RECIPIENTS])
        fields = accepted_fields(structs.replace(message, envelope=envelope), redact, {})
        del fields["message-id"]
        to = [redact.mailbox(each.address) for each in envelope.recipients]
        return fields | {"recipients": len(recipients), "to": to} | _labels(message, redact)

    def tell(self, name: str, fields: dict[str, Field]) -> None:
        """Post an event about the relay itself."""
        for courier in itertools.chain.from_iterable(self._asking({name})):
            redact = courier.redact
            data = {
                key: redact.text(value) if isinstance(value, str) else value for key, value in fields.items()
            }
            courier.put(f"msg_{self.ids.next()}_0", self._body(name, self.clock.now(), data))

    def _asking(self, names: set[str]) -> Iterator[list[WebhookCourier]]:
        """Yield groups of enabled couriers that want one of these events and get equal content. The couriers
        of a group share one stored message.
        """
        for alike in self._alike:
            enabled = [courier for courier in alike if not courier.is_disabled]
            if enabled and any(self._wants(enabled[0], name) for name in names):
                yield enabled

    @staticmethod
    def _wants(courier: WebhookCourier, name: str) -> bool:
        return not courier.settings.events or name in courier.settings.events

    def _submit(
        self,
        webhooks: Sequence[str],
        source: str,
        step: int,
        events: Sequence[tuple[str, float, Mapping[str, object]]],
        created: float | None = None,
    ) -> OwnMessage:
        event_id = self.ids.next()
        lines = [
            b"msg_%s_%d\t%s\r\n" % (event_id.encode(), at, self._body(*each))
            for at, each in enumerate(events)
        ]
        body = b"".join(lines)
        now = self.clock.now() if created is None else created
        about = EventPosition(source, step, len(events))
        recipients = {each: about.recipient(each) for each in webhooks}
        envelope = Envelope(
            id=event_id,
            sender=NULL_SENDER,
            recipients=tuple(Recipient(address=each) for each in recipients.values()),
            created=now,
            origin=Origin(protocol=PROTOCOL),
        )
        deliveries = tuple(
            Delivery(queue=webhook_queue(name), message_id=event_id, recipient=recipient, created=now)
            for name, recipient in recipients.items()
        )
        message = Message(envelope=envelope, size=len(body), chunks=-(-len(body) // CHUNK_SIZE))
        return OwnMessage(message, body, deliveries)

    def _body(self, name: str, at: float, data: Mapping[str, object]) -> bytes:
        event = {"type": name, "timestamp": _iso(at), "data": {**data, "relay": self.hostname}}
        try:
            return _encode(event)
        except UnicodeEncodeError:  # unpaired surrogate
            return json.dumps(event, separators=(",", ":")).encode()

    # Operators' requests

    def problems(self) -> tuple[str, ...]:
        return tuple(
            f"webhook {each.name} "
            f"{'rejects further events' if each.is_disabled else 'does not accept events'}: {each.problem};"
            f" {each.queued} events are queued, see zonerelay webhook list"
            for each in self._couriers.values()
            if each.problem
        )

    def couriers(self) -> list[WebhookCourier]:
        return list(self._couriers.values())

    def courier(self, name: str) -> WebhookCourier | None:
        return self._couriers.get(name)

    async def test(self, courier: WebhookCourier) -> tuple[bool, str]:
        """Post a `webhook.test` event now, and return whether it was accepted and the endpoint's response."""
        now = self.clock.now()
        body = self._body("webhook.test", now, {"webhook": courier.name})
        answer = await courier.endpoint.post(f"msg_{self.ids.next()}_0", body)
        return answer.ok, answer.text

    async def replay(self, courier: WebhookCourier, since: float | None) -> int:
        """Retry the queued events of a webhook now. With `since` (Unix time), also report again the events in
        the history from then on. Return the number of queued events.
        """
        if since is not None:
            records, accepted = await REPORTS.run(self._read, since)
            made = (list(self._again(courier, accepted, *each)) for each in records if each[0] >= since)
            events = [each async for some in in_slices(made, self.clock.monotonic) for each in some]
            for start in range(0, len(events), AT_ONCE):
                submits = [
                    self._submit([courier.name], source, 1, [event])
                    for source, event in events[start : start + AT_ONCE]
                ]
                await self.store.settle(submits)
        return courier.retry()

    def _read(self, since: float) -> tuple[Sequence[_Record], Mapping[str, Mapping[str, Field]]]:
        """Return the history since a time, and the acceptances in it by message. Blocks."""
        records = self.records(since)
        return records, {
            str(fields.get("id", "")): fields for _, name, fields in records if name == "accepted"
        }

    def _again(
        self,
        courier: WebhookCourier,
        accepted: Mapping[str, Mapping[str, Field]],
        at: float,
        name: str,
        fields: Mapping[str, Field],
    ) -> Iterator[tuple[str, tuple[str, float, dict[str, object]]]]:
        doubt = name == "deferred" and fields.get("in_doubt")
        reported = "message.accepted" if name == "accepted" else f"delivery.{'in_doubt' if doubt else name}"
        if self._wants(courier, reported) and name in ("accepted", *Verdict):
            redact = courier.redact
            source = str(fields.get("id", ""))
            about = accepted.get(source, {})
            data: dict[str, object] = {key: about[key] for key in ("sender", "user") if key in about}
            data |= dict(fields) | {"replayed": True}
            for key in ("sender", "recipient", "user", "client", "to"):
                if redact.enabled and key in data:
                    data[key] = " ".join(_hidden(redact, key, each) for each in str(data[key]).split(" "))
            if "to" in data:
                data["to"] = str(data["to"]).split(" ")[:RECIPIENTS]
            data.pop("message-id", None)
            data["message_id"] = _shown_id(str(about.get("message-id", "")), redact)
            data["tags"] = str(about.get("tags", "")).split()
            data["metadata"] = json.loads(str(about.get("metadata", "{}")))
            yield source, (reported, at, data)


def _labels(message: Message, redact: Redactor) -> dict[str, object]:
    """Return the fields with which an application identifies its message."""
    header_id = message.header("message-id").strip().strip("<>")
    shown = {"message_id": _shown_id(header_id, redact)}
    return {**shown, "tags": message.tags, "metadata": message.metadata}


def _shown_id(header_id: str, redact: Redactor) -> str:
    """Return a Message-ID in the form of its header field, or its pseudonym, which the history may already
    contain.
    """
    if not header_id or header_id.startswith("u-"):
        return header_id
    shown = redact.message_id(header_id)[:LONGEST]
    return shown if redact.enabled else f"<{shown}>"


def _hidden(redact: Redactor, key: str, value: str) -> str:
    """Return the pseudonym of a value in the history, which may be a plain address or a pseudonym already."""
    if value == "<>" or value.startswith(("u-", "c-")):
        return value
    if key == "user":
        return redact.user(value)
    return redact.client(value) if key == "client" else redact.mailbox(Mailbox(value))


def _type_of(reported: Result) -> str:
    _, outcome, next_attempt = reported
    if outcome.verdict is Verdict.DEFERRED and next_attempt is None:
        return "delivery.held"
    if outcome.verdict is Verdict.DEFERRED and outcome.in_doubt:
        return "delivery.in_doubt"
    return f"delivery.{outcome.verdict.value}"


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
