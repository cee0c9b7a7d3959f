"""Handles operators' requests in a worker, such as queries and changes of its queue.

A failure of the store is answered with a ControlError that contains the store's message.

`Bodies` returns the bytes of one message, as received or as a zone would send them. The stored body is read
in chunks, so that only one is in memory. A rendition is the one that the zone's attempts use
(`delivery/rewrite`), and it is cached for them. Every access is logged with the name of the operator.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import structs

from zonerelay import __version__
from zonerelay.config.settings import ZoneSettings
from zonerelay.control.acts import OperatorActs, queue_filter
from zonerelay.control.explain import Explainer
from zonerelay.control.orders import OrderAnswers
from zonerelay.control.runner import ResponseStream
from zonerelay.control.streams import LiveStreams
from zonerelay.delivery.rewrite.rendering import ReadBody, Renderer, RenderError
from zonerelay.model.delivery import Delivery, DeliveryKey, DeliveryState
from zonerelay.model.envelope import Message, MessageId
from zonerelay.operations import answers, requests
from zonerelay.operations.catalogue import OPERATIONS
from zonerelay.operations.errors import ControlError, NotFoundError, UnavailableError
from zonerelay.process.tasks import in_slices
from zonerelay.queue.destination.destinations import suspended
from zonerelay.queue.operator.filters import QueueFilter
from zonerelay.queue.operator.journal import JournalError
from zonerelay.queue.operator.operations import BOUNDS, Operations, RerouteError
from zonerelay.queue.orders.orders import OrdersError
from zonerelay.store.contract import MessageNotFoundError, Store, StoreError
from zonerelay.telemetry.logs.redact import Redactor

if TYPE_CHECKING:
    from zonerelay.history.writer import History
    from zonerelay.webhook.courier import WebhookCourier
    from zonerelay.webhook.webhooks import Webhooks  # most relays have none


class Bodies(msgspec.Struct, frozen=True):
    """Reads the bodies of messages for the command `queue cat`. `zone` returns the settings of a configured
    zone. `read` is called with the message, the zone ("" for the stored body) and the operator.
    """

    store: Store
    renderer: Renderer
    zone: Callable[[str], ZoneSettings | None]
    read: Callable[[MessageId, str, str], None]

    async def frames(
        self, request: requests.QueueCat, who: str
    ) -> AsyncGenerator[answers.MessageBody | answers.BodyPiece, None]:
        """Yield a frame that describes the body of a message, and then the body in chunks. Raise ControlError
        or StoreError if it cannot be read.
        """
        message_id, zone = MessageId(request.message_id), ""
        message = await self.store.read_message(message_id)
        read_body: ReadBody = self.store.read_body
        if request.as_sent:
            settings = await self._zone_of(message_id, request.zone)
            zone = settings.name
            try:
                rendered = await self.renderer.render(settings, message)
            except RenderError as error:
                raise ControlError(f"{message_id} cannot be sent unchanged: {error.reply}") from error
            message, read_body = rendered.message, rendered.read_body
        self.read(message_id, zone, who)
        yield answers.MessageBody(
            message_id=message_id, sender=message.envelope.sender, size=message.size, zone=zone
        )
        async with aclosing(read_body(message_id)) as pieces:
            async for piece in pieces:
                yield answers.BodyPiece(octets=piece)

    async def _zone_of(self, message_id: MessageId, wanted: str) -> ZoneSettings:
        names = sorted({delivery.zone for delivery in await self.store.deliveries_of(message_id)})
        if not names:
            raise MessageNotFoundError(f"the queue has no delivery of {message_id}")
        if wanted and wanted not in names:
            raise ControlError(
                f"zone {wanted} has no delivery of {message_id}; its zones are {', '.join(names)}"
            )
        if not wanted and len(names) > 1:
            raise ControlError(f"{message_id} is in the zones {', '.join(names)}; choose one with --zone")
        name = wanted or names[0]
        settings = self.zone(name)
        if settings is None:
            raise ControlError(f"zone {name} is not configured, so the message cannot be sent")
        return settings


MAX_EXPLAINED = 20
"""Zones and domains of one message that are explained."""


Method = Callable[[Any, ResponseStream], Awaitable[answers.Frame | Iterable[answers.Frame] | None]]
"""Answers one type of request. Frames that it has not sent itself are sent when it returns them."""


@dataclass(eq=False, repr=False, kw_only=True)
class ControlHandler:
    """Handles operators' requests in a worker (implements `control.runner.Handler`). `status` returns the
    worker's status. A supervisor also requests the metrics (after a `refresh`, as before a scrape) and for
    the reasons why the worker is not ready.
    """

    operations: Operations
    status: Callable[[], Awaitable[answers.RelayStatus]]
    explainer: Explainer
    orders: OrderAnswers
    redactor: Redactor
    bodies: Bodies
    streams: LiveStreams
    phase_of: Callable[[DeliveryKey], tuple[str, float] | None]
    turn_of: Callable[[str, str], Awaitable[answers.DestinationStatus | None]]
    acknowledge: Callable[[str], Awaitable[bool]]
    refresh: Callable[[], Awaitable[None]]
    unready: Callable[[], Awaitable[Sequence[str]]]
    webhooks: Callable[[], Webhooks | None]
    history: History | None

    def __post_init__(self) -> None:
        self.acts = OperatorActs(self.operations, self.explainer.zones)
        self._methods: dict[type[requests.Request], Method] = {
            requests.Status: lambda _, answer: self.status(),
            requests.QueueList: self._list,
            requests.QueueCount: self._count,
            requests.QueueSummary: self._summary,
            requests.QueueShow: self._show,
            requests.QueueTrace: lambda wanted, _: self.operations.trace(MessageId(wanted.message_id)),
            requests.QueueCat: self._cat,
            requests.QueueExplain: self._explain_queued,
            **dict.fromkeys(
                requests.CHANGES.values(),
                lambda change, answer: self.acts.change(change, answer.call, answer),
            ),
            requests.Acts: lambda wanted, answer: self.acts.rows(wanted.limit),
            requests.ActShow: lambda wanted, answer: self.acts.row(wanted.act),
            requests.Undo: self._undo,
            requests.Orders: lambda _, answer: self.orders.in_force(),
            requests.Suspend: lambda order, answer: self.orders.suspend(order, answer.call),
            requests.Resume: lambda order, answer: self.orders.resume(order, answer.caller),
            requests.Explain: lambda wanted, answer: self.explainer.explain(wanted),
            requests.Resolve: self._resolve,
            requests.Tail: self.streams.tail,
            requests.Transcript: self.streams.transcribe,
            requests.SpoolAcknowledge: self._acknowledge_loss,
            requests.WebhookList: self._list_webhooks,
            requests.WebhookTest: self._test_webhook,
            requests.WebhookReplay: self._replay_webhook,
            requests.Ping: self._ping,
            requests.PartMetrics: self._part_metrics,
            requests.PartReadiness: self._part_readiness,
        }
        missing = {each.request for each in OPERATIONS if each.reply is not None} ^ self._methods.keys()
        if missing:
            raise AssertionError(f"the handler and the catalogue differ: {missing}")

    async def handle(self, request: requests.Request, answer: ResponseStream) -> answers.EndFrame:
        try:
            found = await self._methods[type(request)](request, answer) or ()
            if isinstance(found, answers.EndFrame):
                return found
            for frame in (found,) if isinstance(found, msgspec.Struct) else found:
                await answer.send(frame)
            return answers.EndFrame()
        except MessageNotFoundError as error:
            await self._history_written()
            raise NotFoundError(str(error)) from error
        except StoreError as error:
            raise UnavailableError(f"the spool: {error}") from error
        except (OrdersError, JournalError, RerouteError) as error:
            raise ControlError(str(error)) from error

    async def _history_written(self) -> None:
        """Wait until the history contains all mail that has left the queue, because the client will look
        there.
        """
        if self.history is not None:
            await self.history.written()

    async def _ping(self, *_: object) -> answers.Pong:
        return answers.Pong(software=__version__, pid=os.getpid())

    async def _part_metrics(self, *_: object) -> answers.MetricFamilies:
        await self.refresh()
        return answers.MetricFamilies(families=self.operations.events.metrics.families())

    async def _part_readiness(self, *_: object) -> answers.UnreadyReasons:
        return answers.UnreadyReasons(reasons=tuple(await self.unready()))

    async def _undo(self, request: requests.Undo, answer: ResponseStream) -> answers.ChangeResult:
        ended = await self.orders.undo(request.undoes, request.reason, answer.caller)
        return ended or await self.acts.undo(request, answer.call, answer)

    async def _cat(self, request: requests.QueueCat, answer: ResponseStream) -> None:
        async with aclosing(self.bodies.frames(request, answer.caller)) as frames:
            async for frame in frames:
                await answer.send(frame)

    async def _acknowledge_loss(self, request: requests.SpoolAcknowledge, _: object) -> answers.LossDismissal:
        if not await self.acknowledge(request.loss):
            raise NotFoundError(f"the spool has no reported loss {request.loss}")
        return answers.LossDismissal(loss=request.loss)

    async def _list_webhooks(self, *_: object) -> Iterable[answers.Frame]:
        webhooks = self.webhooks()
        rows = () if webhooks is None else webhooks.couriers()
        return [msgspec.convert(row, answers.WebhookRow, from_attributes=True) for row in rows]

    async def _test_webhook(self, request: requests.WebhookTest, _: object) -> answers.WebhookTestResult:
        webhooks, courier = self._webhook(request.name)
        ok, text = await webhooks.test(courier)
        return answers.WebhookTestResult(ok=ok, text=text)

    async def _replay_webhook(
        self, request: requests.WebhookReplay, _: object
    ) -> answers.WebhookReplayResult:
        webhooks, courier = self._webhook(request.name)
        return answers.WebhookReplayResult(queued=await webhooks.replay(courier, request.since))

    def _webhook(self, name: str) -> tuple[Webhooks, WebhookCourier]:
        """Return the `Webhooks` of this worker, and the courier of the webhook with this name. Raise
        NotFoundError if it does not exist.
        """
        webhooks = self.webhooks()
        courier = None if webhooks is None else webhooks.courier(name)
        if webhooks is None or courier is None:
            raise NotFoundError(f"no [[webhook]] has the name {name}")
        return webhooks, courier

    async def _list(self, request: requests.QueueList, answer: ResponseStream) -> answers.EndFrame:
        # One row more than requested shows whether there are more.
        limit = request.limit + 1 if request.limit else None
        rows = 0
        wanted = queue_filter(request.filter)
        after = answers.place_of(request.cursor) if request.cursor else None
        row = None
        async with aclosing(self.operations.select(wanted, limit, answer, after=after)) as found:
            async for delivery, message, state in found:
                if row is not None and rows == request.limit:
                    return answers.EndFrame(count=rows, more=True, next=answers.cursor_of(row))
                row = await self._row(delivery, message, state)
                await answer.send(row)
                rows += 1
        return answers.EndFrame(count=rows, missing=self.operations.left_out())

    async def _count(self, request: requests.QueueCount, answer: ResponseStream) -> answers.EndFrame:
        wanted = structs.replace(queue_filter(request.filter, request.message_ids), in_bin=request.in_bin)
        sample: list[answers.DeliveryRow] = []
        if request.sample:
            async with aclosing(self.operations.select(wanted, request.sample)) as found:
                sample = [
                    await self._row(delivery, message, state) async for delivery, message, state in found
                ]
        matched = await self.operations.count(wanted, answer)
        await answer.send(answers.Count(matched=matched, sample=tuple(sample)))
        return answers.EndFrame(missing=self.operations.left_out())

    async def _summary(self, request: requests.QueueSummary, answer: ResponseStream) -> answers.EndFrame:
        tally = await self.operations.summary(
            queue_filter(request.filter), request.by, exact=request.exact, progress=answer
        )
        await answer.send(
            answers.summary_of(request.by, BOUNDS, tally.counts, tally.other, every=tally.every)
        )
        return answers.EndFrame(missing=self.operations.left_out())

    async def _show(self, request: requests.QueueShow, answer: ResponseStream) -> answers.MessageDetail:
        message, rows = await self._rows_of(request.message_id)
        detail = message_detail(message, rows)
        if len(rows) < detail.recipients_accepted:
            await self._history_written()
        return msgspec.structs.replace(detail, orders=self.orders.named_in(rows))

    async def _row(
        self, delivery: Delivery, message: Message | None, state: DeliveryState
    ) -> answers.DeliveryRow:
        row = delivery_row(delivery, message, state)
        order = self.operations.order_of(delivery, message)
        if order:
            return msgspec.structs.replace(row, order=order)
        if state is DeliveryState.ACTIVE:
            phase = self.phase_of(delivery.key)
            name, seconds = phase or ("", 0.0)
            return msgspec.structs.replace(row, phase=name, phase_seconds=seconds)
        found = None if delivery.held else self.operations.suspension_of(delivery)
        if found is None:
            turn = state is DeliveryState.READY and await self.turn_of(delivery.zone, delivery.domain)
            return row.waits_for(turn) if turn else row
        until, reply = found
        # Mail that stays in the store until the next probe has no reply of its own, or an old one.
        return msgspec.structs.replace(
            row,
            next_attempt=max(row.next_attempt, until),
            reply=row.reply if delivery.attempts else str(suspended(reply)),
        )

    async def _rows_of(self, message_id: str) -> tuple[Message, list[answers.DeliveryRow]]:
        shown = await self.operations.show(MessageId(message_id))
        rows = [
            self.explainer.compared(shown.message, await self._row(delivery, shown.message, state))
            async for delivery, state in in_slices(shown.deliveries, self.operations.clock.monotonic)
        ]
        return shown.message, rows

    async def _explain_queued(self, request: requests.QueueExplain, answer: ResponseStream) -> None:
        message, rows = await self._rows_of(request.message_id)
        wanted = request.address.strip("<> ").lower()
        by_domain: dict[tuple[str, str], answers.DeliveryRow] = {}
        for row in rows:
            if not wanted or row.recipient.lower() == wanted:
                by_domain.setdefault((row.zone, row.domain), row)
        if not by_domain:
            to = f" to {request.address}" if wanted else ""
            raise NotFoundError(f"message {request.message_id} has no open delivery{to}")
        for row in list(by_domain.values())[:MAX_EXPLAINED]:
            await answer.send(await self.explainer.explain_queued(message, row))

    async def _resolve(self, request: requests.Resolve, answer: ResponseStream) -> answers.EndFrame:
        """Send the client each address that has this pseudonym, once, with the id of one of its messages."""
        matches, seen = self.redactor.matches, set[str]()
        wanted = set(re.split(r"[\s<>]+", request.pseudonym.lower()))
        if request.recent:
            redactors = (self.redactor, *([self.history.redactor] if self.history else []))
            known = list(dict.fromkeys(address for each in redactors for address in each.known(wanted)))
            for address in known[: request.limit]:
                await answer.send(answers.ResolvedAddress(address=address, role="", message_id=""))
            return answers.EndFrame(count=min(len(known), request.limit), more=len(known) > request.limit)
        async with aclosing(self.operations.select(QueueFilter(), None, answer)) as found:
            async for delivery, message, _ in found:
                mailboxes = [(delivery.recipient, "recipient")]
                if message is not None:
                    mailboxes.append((message.envelope.sender, "sender"))
                for mailbox, role in mailboxes:
                    if mailbox in seen or not matches(wanted, mailbox):
                        continue
                    if len(seen) == request.limit:
                        return answers.EndFrame(count=len(seen), more=True)
                    seen.add(mailbox)
                    await answer.send(
                        answers.ResolvedAddress(address=mailbox, role=role, message_id=delivery.message_id)
                    )
        return answers.EndFrame(count=len(seen), missing=self.operations.left_out())


def delivery_row(delivery: Delivery, message: Message | None, state: DeliveryState) -> answers.DeliveryRow:
    """Convert a delivery to a row of a response. `message` is `None` if it could not be read; sender and size
    are then unknown.
    """
    last = delivery.last
    return answers.DeliveryRow(
        message_id=delivery.message_id,
        zone=delivery.zone,
        priority=delivery.priority.value,
        sender=None if message is None else message.envelope.sender,
        recipient=delivery.recipient,
        domain=delivery.domain,
        state=state.value,
        created=delivery.created,
        attempts=delivery.attempts,
        next_attempt=delivery.next_attempt,
        size=None if message is None else message.size,
        reply="" if last is None else str(last.reply),
        host="" if last is None else last.host,
        peer="" if last is None else last.peer,
        last_attempt=None if last is None else last.at,
        in_doubt=last is not None and last.in_doubt,
    )


def message_detail(message: Message, rows: Iterable[answers.DeliveryRow]) -> answers.MessageDetail:
    """Return the details of a stored message. What its parts call by the same name is not named here."""
    envelope = message.envelope
    known = {**structs.asdict(envelope.origin), **structs.asdict(envelope), **structs.asdict(message)}
    return msgspec.convert(
        known
        | {
            "message_id": message.id,
            "client": envelope.origin.client_address,
            "recipients": [each.address for each in envelope.recipients],
            "recipients_accepted": len(envelope.recipients),
            "deliveries": tuple(rows),
        },
        answers.MessageDetail,
    )
