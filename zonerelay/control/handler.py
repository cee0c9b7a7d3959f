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
from zonerelay.control.acts import OperatorActs, queue_filter
from zonerelay.control.bodies import Bodies
from zonerelay.control.explain.explainer import Explainer
from zonerelay.control.messages import answers, requests
from zonerelay.control.orders import OrderAnswers
from zonerelay.control.socket.errors import ControlError, NotFoundError
from zonerelay.control.socket.server import Answer
from zonerelay.control.streams import Streams
from zonerelay.model.delivery import Delivery, DeliveryKey, DeliveryState
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId
from zonerelay.queue.operator.operations import BOUNDS, Operations, QueueFilter, Tally
from zonerelay.store.contract import MessageNotFoundError, StoreError
from zonerelay.telemetry.logs.redact import Redactor
from zonerelay.telemetry.metrics.families import Family

if TYPE_CHECKING:
    from zonerelay.history.writer import History
    from zonerelay.webhook.webhooks import Webhooks  # most relays have none

MAX_RESOLVED = 100
"""Addresses in one answer to `resolve`: a domain's pseudonym may stand for a whole queue."""

MAX_EXPLAINED = 20
"""Zones and domains of one message that are explained."""


async def _nothing_lost(_loss: str) -> bool:
    return False


class ControlHandler:
    """Satisfies `control.server.Handler`. `status` composes the relay's own part of the answer."""

    def __init__(
        self,
        operations: Operations,
        *,
        status: Callable[[], Awaitable[answers.RelayStatus]],
        explainer: Explainer,
        orders: OrderAnswers,
        redactor: Redactor,
        bodies: Bodies,
        acts: OperatorActs,
        streams: Streams,
        acknowledge: Callable[[str], Awaitable[bool]] = _nothing_lost,
        part: PartAnswers | None = None,
        webhooks: Callable[[], Webhooks | None] = lambda: None,
        history: History | None = None,
    ) -> None:
        self._history = history
        self._webhooks = webhooks
        self._acknowledge = acknowledge
        self._part = part
        self._bodies = bodies
        self._acts = acts
        self._streams = streams
        self._operations = operations
        self._status = status
        self._explainer = explainer
        self._orders = orders
        self._redactor = redactor

    async def handle(self, request: requests.Request, answer: Answer) -> answers.End:
        try:
            return await self._handle(request, answer)
        except MessageNotFoundError as error:
            await self._history_written()
            raise NotFoundError(str(error)) from error
        except StoreError as error:
            raise ControlError(f"the spool: {error}") from error

    async def _handle(self, request: requests.Request, answer: Answer) -> answers.End:  # noqa: PLR0912 - a case for each
        match request:
            case requests.QueueList():
                return await self._list(request, answer)
            case requests.Resolve():
                return await self._resolve(request, answer)
            case requests.Tail() | requests.Transcript():
                return await self._streams.answer(request, answer)
            case requests.QueueCount():
                await self._count(request, answer)
            case requests.QueueSummary():
                await answer.send(await self._summary(request, answer))
                return answers.End(missing=self._operations.left_out())
            case requests.QueueChange():
                await answer.send(await self._acts.change(request, request.who or answer.caller, answer))
            case requests.Undo():
                who = request.who or answer.caller
                ended = await self._orders.undo(request.undoes, request.reason, who)
                await answer.send(ended or await self._acts.undo(request, who, answer))
            case requests.Acts():
                for row in await self._acts.rows(request):
                    await answer.send(row)
            case requests.Explain(message_id=""):
                await answer.send(await self._explainer.explain(request))
            case requests.Explain():
                await self._explain_queued(request, answer)
            case requests.QueueShow():
                await self._show(request, answer)
            case requests.QueueTrace():
                await self._trace(request, answer)
            case requests.QueueCat():
                async with aclosing(self._bodies.frames(request, request.who or answer.caller)) as frames:
                    async for frame in frames:
                        await answer.send(frame)
            case requests.Suspend() | requests.Resume() | requests.Orders():
                await answer.send(await self._orders.answer(request, answer.caller))
            case requests.WebhookList() | requests.WebhookTest() | requests.WebhookReplay():
                await self._webhook(request, answer)
            case requests.Status():
                await answer.send(await self._status())
            case requests.SpoolAcknowledge():
                if not await self._acknowledge(request.loss):
                    raise NotFoundError(f"no loss {request.loss} of the spool waits to be acknowledged")
                await answer.send(answers.Acknowledged(loss=request.loss))
            case requests.PartMetrics() if self._part is not None:
                await answer.send(await self._part.metrics())
            case requests.PartReadiness() if self._part is not None:
                await answer.send(await self._part.ready())
            case requests.Ping():
                await answer.send(answers.Pong(software=__version__, pid=os.getpid()))
        return answers.End()

    async def _history_written(self) -> None:
        """Wait until what is no longer in the queue is in the history, where the client looks next."""
        if self._history is not None:
            await self._history.written()

    async def _webhook(
        self, request: requests.WebhookList | requests.WebhookTest | requests.WebhookReplay, answer: Answer
    ) -> None:
        webhooks = self._webhooks()
        if isinstance(request, requests.WebhookList):
            for row in () if webhooks is None else webhooks.couriers():
                await answer.send(msgspec.convert(row, answers.WebhookRow, from_attributes=True))
            return
        courier = None if webhooks is None else webhooks.courier(request.name)
        if webhooks is None or courier is None:
            raise NotFoundError(f"no [[webhook]] is named {request.name}")
        if isinstance(request, requests.WebhookTest):
            ok, text = await webhooks.test(courier)
            await answer.send(answers.WebhookTested(ok=ok, text=text))
        else:
            await answer.send(answers.WebhookReplayed(queued=await webhooks.replay(courier, request.since)))

    async def _list(self, request: requests.QueueList, answer: Answer) -> answers.End:
        # One more than asked for: that is how we know that there are more.
        limit = request.limit + 1 if request.limit else None
        rows = 0
        wanted = queue_filter(request.filter)
        after = None if request.after is None else msgspec.convert(request.after, DeliveryKey)
        async with aclosing(self._operations.select(wanted, limit, answer, after=after)) as found:
            async for delivery, message, state in found:
                if request.limit and rows == request.limit:
                    return answers.End(count=rows, more=True)
                await answer.send(self._row(delivery, message, state))
                rows += 1
        return answers.End(count=rows, missing=self._operations.left_out())

    async def _count(self, request: requests.QueueCount, answer: Answer) -> None:
        wanted = queue_filter(request.filter)
        async with aclosing(self._operations.select(wanted, request.sample)) as found:
            async for delivery, message, state in found:
                await answer.send(self._row(delivery, message, state))
        await answer.send(answers.Count(matched=await self._operations.count(wanted, answer)))

    async def _summary(self, request: requests.QueueSummary, answer: Answer) -> answers.Summary:
        tally = await self._operations.summary(
            queue_filter(request.filter), request.by, exact=request.exact, progress=answer
        )
        return summary(request.by, tally)

    async def _show(self, request: requests.QueueShow, answer: Answer) -> None:
        message, rows = await self._rows_of(request.message_id)
        detail = message_detail(message, rows)
        if len(rows) < detail.recipients_accepted:
            await self._history_written()
        await answer.send(msgspec.structs.replace(detail, orders=self._orders.named_in(rows)))

    def _row(self, delivery: Delivery, message: Message | None, state: DeliveryState) -> answers.DeliveryRow:
        row = delivery_row(delivery, message, state)
        order = self._orders.of(delivery, message)
        return msgspec.structs.replace(row, order=order) if order else row

    async def _rows_of(self, message_id: str) -> tuple[Message, list[answers.DeliveryRow]]:
        shown = await self._operations.show(MessageId(message_id))
        rows = (self._row(delivery, shown.message, state) for delivery, state in shown.deliveries)
        return shown.message, [self._explainer.compared(shown.message, row) for row in rows]

    async def _explain_queued(self, request: requests.Explain, answer: Answer) -> None:
        message, rows = await self._rows_of(request.message_id)
        wanted = request.address.strip("<> ").lower()
        told: dict[tuple[str, str], answers.DeliveryRow] = {}
        for row in rows:
            if not wanted or row.recipient.lower() == wanted:
                told.setdefault((row.zone, row.domain), row)
        if not told:
            to = f" to {request.address}" if wanted else ""
            raise NotFoundError(f"message {request.message_id} has no open delivery{to}")
        for row in list(told.values())[:MAX_EXPLAINED]:
            await answer.send(await self._explainer.explain_queued(message, row))

    async def _trace(self, request: requests.QueueTrace, answer: Answer) -> None:
        for step in await self._operations.trace(MessageId(request.message_id)):
            await answer.send(
                answers.TraceStep(at=step.at, event=step.event, recipient=step.recipient, text=step.text)
            )

    async def _resolve(self, request: requests.Resolve, answer: Answer) -> answers.End:
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
                        return answers.End(count=len(seen), more=True)
                    seen.add(mailbox)
                    await answer.send(
                        answers.Address(address=mailbox, role=role, message_id=delivery.message_id)
                    )
        return answers.End(count=len(seen), missing=self._operations.left_out())


def delivery_row(delivery: Delivery, message: Message | None, state: DeliveryState) -> answers.DeliveryRow:
    """`message` is `None` when it could not be read: sender and size are then unknown."""
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


def summary(by: str, tally: Tally) -> answers.Summary:
    rows = [
        answers.SummaryRow(key=key, total=sum(ages), ages=tuple(ages)) for key, ages in tally.counts.items()
    ]
    other = answers.SummaryRow(key="other", total=sum(tally.other), ages=tuple(tally.other))
    return answers.Summary(
        by=by,
        minutes=BOUNDS,
        rows=tuple(sorted(rows, key=lambda row: (-row.total, row.key))),
        other=other if other.total else None,
        every=tally.every,
    )


def message_detail(message: Message, rows: Iterable[answers.DeliveryRow]) -> answers.MessageDetail:
    envelope = message.envelope
    origin = envelope.origin
    return answers.MessageDetail(
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
        recipients=tuple(each.address for each in envelope.recipients),
        require_tls=envelope.require_tls,
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

    async def metrics(self) -> answers.Families:
        await self._refresh()
        return answers.Families(families=self._families())

    async def ready(self) -> answers.Reasons:
        return answers.Reasons(reasons=tuple(await self._reasons()))
