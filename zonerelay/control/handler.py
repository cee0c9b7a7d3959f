"""The handler of requests in a worker: it asks the operations of the queue, the status, the explainer.

It answers a failure of the store with ControlError in the store's words.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec

from zonerelay import __version__
from zonerelay.control.bodies import Bodies
from zonerelay.control.explain.explainer import Explainer
from zonerelay.control.messages.answers import (
    Acknowledged,
    Address,
    Changed,
    Count,
    DeliveryRow,
    End,
    Explanation,
    Families,
    MessageDetail,
    Pong,
    Reasons,
    RelayStatus,
    Summary,
    SummaryRow,
    TraceStep,
    WebhookReplayed,
    WebhookRow,
    WebhookTested,
)
from zonerelay.control.messages.requests import (
    Explain,
    Filter,
    PartMetrics,
    PartReadiness,
    Ping,
    QueueCat,
    QueueChange,
    QueueCount,
    QueueList,
    QueueShow,
    QueueSummary,
    QueueTrace,
    Request,
    Resolve,
    SpoolAcknowledge,
    Status,
    WebhookList,
    WebhookReplay,
    WebhookTest,
)
from zonerelay.control.socket.errors import ControlError, NotFoundError
from zonerelay.control.socket.server import Answer
from zonerelay.model.delivery import Delivery, DeliveryState
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId
from zonerelay.queue.operator.operations import BOUNDS, Operations, QueueFilter, Tally
from zonerelay.store.contract import MessageNotFoundError, StoreError
from zonerelay.telemetry.logs.redact import Redactor
from zonerelay.telemetry.metrics.families import Family

if TYPE_CHECKING:
    from zonerelay.webhook.webhooks import Webhooks  # most relays have none

MAX_RESOLVED = 100
"""Addresses in one answer to `resolve`: a domain's pseudonym may stand for a whole queue."""

DEFAULT_REASON = "given up by the operator"


async def _nothing_lost(_loss: str) -> bool:
    return False


class ControlHandler:
    """Satisfies `control.server.Handler`. `status` composes the relay's own part of the answer."""

    def __init__(
        self,
        operations: Operations,
        *,
        status: Callable[[], Awaitable[RelayStatus]],
        explainer: Explainer,
        redactor: Redactor,
        bodies: Bodies,
        acknowledge: Callable[[str], Awaitable[bool]] = _nothing_lost,
        part: PartAnswers | None = None,
        webhooks: Callable[[], Webhooks | None] = lambda: None,
    ) -> None:
        self._webhooks = webhooks
        self._acknowledge = acknowledge
        self._part = part
        self._bodies = bodies
        self._operations = operations
        self._status = status
        self._explainer = explainer
        self._redactor = redactor

    async def handle(self, request: Request, answer: Answer) -> End:
        try:
            return await self._handle(request, answer)
        except MessageNotFoundError as error:
            raise NotFoundError(str(error)) from error
        except StoreError as error:
            raise ControlError(f"the spool: {error}") from error

    async def _handle(self, request: Request, answer: Answer) -> End:
        match request:
            case QueueList():
                return await self._list(request, answer)
            case QueueCount():
                await self._count(request, answer)
            case QueueChange():
                await answer.send(await self._change(request, answer))
            case QueueShow() | QueueTrace() | QueueCat():
                await self._one(request, answer)
            case QueueSummary():
                await answer.send(await self._summary(request, answer))
                return End(missing=self._operations.left_out())
            case Resolve():
                return await self._resolve(request, answer)
            case Explain() | Status() | SpoolAcknowledge():
                await answer.send(await self._answer(request))
            case WebhookList() | WebhookTest() | WebhookReplay():
                await self._webhook(request, answer)
            case PartMetrics() if self._part is not None:
                await answer.send(await self._part.metrics())
            case PartReadiness() if self._part is not None:
                await answer.send(await self._part.ready())
            case Ping():
                await answer.send(Pong(software=__version__, pid=os.getpid()))
        return End()

    async def _webhook(self, request: WebhookList | WebhookTest | WebhookReplay, answer: Answer) -> None:
        webhooks = self._webhooks()
        if isinstance(request, WebhookList):
            for row in () if webhooks is None else webhooks.status():
                await answer.send(WebhookRow(**row))
            return
        courier = None if webhooks is None else webhooks.courier(request.name)
        if webhooks is None or courier is None:
            raise NotFoundError(f"no [[webhook]] is named {request.name}")
        if isinstance(request, WebhookTest):
            ok, text = await webhooks.test(courier)
            await answer.send(WebhookTested(ok=ok, text=text))
        else:
            await answer.send(WebhookReplayed(queued=await webhooks.replay(courier, request.since)))

    async def _answer(
        self, request: Explain | Status | SpoolAcknowledge
    ) -> Explanation | RelayStatus | Acknowledged:
        match request:
            case Explain():
                return await self._explainer.explain(request)
            case Status():
                return await self._status()
            case SpoolAcknowledge():
                if not await self._acknowledge(request.loss):
                    raise NotFoundError(f"no loss {request.loss} of the spool waits to be acknowledged")
                return Acknowledged(loss=request.loss)

    async def _list(self, request: QueueList, answer: Answer) -> End:
        # One more than asked for: that is how we know that there are more.
        limit = request.limit + 1 if request.limit else None
        rows = 0
        async with aclosing(self._operations.select(queue_filter(request.filter), limit, answer)) as found:
            async for delivery, message, state in found:
                if request.limit and rows == request.limit:
                    return End(count=rows, more=True)
                await answer.send(delivery_row(delivery, message, state))
                rows += 1
        return End(count=rows, missing=self._operations.left_out())

    async def _count(self, request: QueueCount, answer: Answer) -> None:
        wanted = queue_filter(request.filter)
        async with aclosing(self._operations.select(wanted, request.sample)) as found:
            async for delivery, message, state in found:
                await answer.send(delivery_row(delivery, message, state))
        await answer.send(Count(matched=await self._operations.count(wanted, answer)))

    async def _change(self, request: QueueChange, answer: Answer) -> Changed:
        if request.filter.is_everything and not request.everything:
            raise ControlError("no filter, and not everything either: which deliveries?")
        wanted = queue_filter(request.filter)
        verbs = {
            "retry": self._operations.retry,
            "hold": self._operations.hold,
            "release": self._operations.release,
            "drop": self._operations.drop,
        }
        if request.action == "bounce":
            result = await self._operations.bounce(wanted, request.reason or DEFAULT_REASON, answer)
        else:
            result = await verbs[request.action](wanted, answer)
        return Changed(
            action=request.action, matched=result.matched, changed=result.changed, busy=result.busy
        )

    async def _summary(self, request: QueueSummary, answer: Answer) -> Summary:
        tally = await self._operations.summary(
            queue_filter(request.filter), request.by, exact=request.exact, progress=answer
        )
        return summary(request.by, tally)

    async def _one(self, request: QueueShow | QueueTrace | QueueCat, answer: Answer) -> None:
        match request:
            case QueueShow():
                await self._show(request, answer)
            case QueueTrace():
                await self._trace(request, answer)
            case QueueCat():
                async with aclosing(self._bodies.frames(request, request.who or answer.caller)) as frames:
                    async for frame in frames:
                        await answer.send(frame)

    async def _show(self, request: QueueShow, answer: Answer) -> None:
        shown = await self._operations.show(MessageId(request.message_id))
        rows = [delivery_row(delivery, shown.message, state) for delivery, state in shown.deliveries]
        await answer.send(message_detail(shown.message, rows))

    async def _trace(self, request: QueueTrace, answer: Answer) -> None:
        for step in await self._operations.trace(MessageId(request.message_id)):
            await answer.send(
                TraceStep(at=step.at, event=step.event, recipient=step.recipient, text=step.text)
            )

    async def _resolve(self, request: Resolve, answer: Answer) -> End:
        """Every address once, with one message that has it."""
        matches, seen = self._redactor.matches, set[str]()
        async with aclosing(self._operations.select(QueueFilter(), None, answer)) as found:
            async for delivery, message, _ in found:
                mailboxes = [(delivery.recipient, "recipient")]
                if message is not None:
                    mailboxes.append((message.envelope.sender, "sender"))
                for mailbox, role in mailboxes:
                    if mailbox in seen or not matches(request.pseudonym, mailbox):
                        continue
                    if len(seen) == MAX_RESOLVED:
                        return End(count=len(seen), more=True)
                    seen.add(mailbox)
                    await answer.send(Address(address=mailbox, role=role, message_id=delivery.message_id))
        return End(count=len(seen), missing=self._operations.left_out())


def queue_filter(wanted: Filter) -> QueueFilter:
    return msgspec.convert(wanted, QueueFilter, from_attributes=True)


def delivery_row(delivery: Delivery, message: Message | None, state: DeliveryState) -> DeliveryRow:
    """`message` is `None` when it could not be read: sender and size are then unknown."""
    last = delivery.last
    return DeliveryRow(
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


def summary(by: str, tally: Tally) -> Summary:
    rows = [SummaryRow(key=key, total=sum(ages), ages=tuple(ages)) for key, ages in tally.counts.items()]
    other = SummaryRow(key="other", total=sum(tally.other), ages=tuple(tally.other))
    return Summary(
        by=by,
        minutes=BOUNDS,
        rows=tuple(sorted(rows, key=lambda row: (-row.total, row.key))),
        other=other if other.total else None,
        every=tally.every,
    )


def message_detail(message: Message, rows: Iterable[DeliveryRow]) -> MessageDetail:
    envelope = message.envelope
    origin = envelope.origin
    return MessageDetail(
        message_id=message.id,
        created=envelope.created,
        sender=envelope.sender,
        size=message.size,
        chunks=message.chunks,
        body=envelope.body.value,
        smtputf8=envelope.smtputf8,
        envid=envelope.envid,
        client=origin.client_address,
        helo=origin.helo,
        protocol=origin.protocol,
        listener=origin.listener,
        user=origin.user,
        tls=origin.tls,
        recipients_accepted=len(envelope.recipients),
        headers=message.headers,
        deliveries=tuple(rows),
    )


class PartAnswers:
    """The answers of a worker to its supervisor, which serves HTTP for all workers.

    `refresh` is awaited before `families`, as before a scrape; `reasons` are those against being ready.
    """

    def __init__(
        self,
        refresh: Callable[[], Awaitable[None]],
        families: Callable[[], tuple[Family, ...]],
        reasons: Callable[[], Awaitable[Sequence[str]]],
    ) -> None:
        self._refresh = refresh
        self._families = families
        self._reasons = reasons

    async def metrics(self) -> Families:
        await self._refresh()
        return Families(families=self._families())

    async def ready(self) -> Reasons:
        return Reasons(reasons=tuple(await self._reasons()))
