"""The catalogue of all operations, each described once.

A new operation consists of an entry here with its request and reply, a method in `control/handler`, a view in
`cli/`, and a test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Union

import msgspec
from msgspec import structs

from zonerelay.model.message_id import MessageId, is_row
from zonerelay.model.queue_name import queues_of
from zonerelay.operations import answers, requests
from zonerelay.operations.errors import InvalidError
from zonerelay.operations.operation import (
    ALONE,
    FIRST_FOUND,
    LIVE,
    WORKER,
    Merge,
    MergeRule,
    Operation,
    ResponseKind,
)
from zonerelay.telemetry.events.records import MailEvent, TraceStep, TranscriptLine

_MESSAGE = "/v1/queue/messages/{message_id}"


def _delivery_order(
    request: requests.QueueList | requests.QueueCount, row: answers.DeliveryRow
) -> tuple[object, ...]:
    """Return the sort key by which each worker lists deliveries: by queue, then the oldest message first,
    with the outbox last. Pages depend on this order. The queues of one zone are listed by priority.
    """
    zone = request.filter.zone
    queues = () if zone is None else queues_of(zone)
    place = queues.index(row.queue) if row.queue in queues else 0
    return place, is_row(MessageId(row.message_id)), row.queue, row.message_id, row.recipient


CHANGED = Merge(add="matched changed busy gone altered", first="act", join="no_undo note")
"""The rule for changes of separate queues. `supervisor/merge` has the one for a shared queue."""
_ORDERS = Merge(key="id", add="held refused", order=lambda _, row: -row.since)
_ACTS = Merge(
    key="act",
    add="changed",
    least="at until finished no_undo undone_by",
    order=lambda _, row: -row.at,
)
_SAMPLE = Merge(how=MergeRule.IN_ORDER, order=_delivery_order, limit="sample")


def _change(request: type[requests.QueueChange], text: str, **more: Any) -> Operation:
    return Operation(
        request=request,
        reply=answers.ChangeResult,
        help=text,
        merge=structs.replace(CHANGED, how=MergeRule.CUSTOM, in_turn="shared"),
        scope="operate",
        method="POST",
        path=f"/v1/queue/{request.action}",
        wrapped="changed",
        completes=True,
        preview=True,
        **more,
    )


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        request=requests.Status,
        reply=answers.RelayStatus,
        help="Show the state of the running relay",
        merge=Merge(how=MergeRule.CUSTOM),
        path="/v1/status",
    ),
    Operation(
        request=requests.QueueList,
        reply=answers.DeliveryRow,
        shape=ResponseKind.ROWS,
        help="List deliveries, oldest message first",
        merge=Merge(how=MergeRule.IN_ORDER, order=_delivery_order, of_queue=True),
        path="/v1/queue",
        wrapped="deliveries",
    ),
    Operation(
        request=requests.QueueCount,
        reply=answers.Count,
        help="Count deliveries",
        merge=Merge(add="matched", rows={"sample": _SAMPLE}, of_queue=True),
        path="/v1/queue/count",
    ),
    Operation(
        request=requests.QueueSummary,
        reply=answers.Summary,
        help="Count deliveries by property and age",
        merge=Merge(how=MergeRule.CUSTOM, of_queue=True),
        path="/v1/queue/summary",
        wrapped="summary",
    ),
    Operation(
        request=requests.QueueShow,
        reply=answers.MessageDetail,
        help="Show a message and the state of each recipient",
        merge=FIRST_FOUND,
        path=_MESSAGE,
    ),
    Operation(
        request=requests.QueueTrace,
        reply=TraceStep,
        shape=ResponseKind.ROWS,
        help="Show a message's history and its next steps",
        merge=FIRST_FOUND,
        path=f"{_MESSAGE}/trace",
        wrapped="steps",
    ),
    Operation(
        request=requests.QueueCat,
        reply=answers.MessageBody,
        shape=ResponseKind.BODY,
        help="Print a message; the log records who has read it",
        merge=FIRST_FOUND,
        scope="operate",
        path=f"{_MESSAGE}/body",
    ),
    Operation(
        request=requests.QueueExplain,
        reply=answers.Explanation,
        shape=ResponseKind.ROWS,
        help="Show the route of a queued message",
        merge=FIRST_FOUND,
        path=f"{_MESSAGE}/explain",
        called="explain",
        wrapped="explanations",
    ),
    _change(requests.Retry, "Retry deliveries now or at a given time"),
    _change(requests.Hold, "Hold deliveries until they are released"),
    _change(requests.Release, "Release held deliveries"),
    _change(
        requests.Reroute,
        "Move deliveries to another zone",
        flags={"filter.zone": "--from-zone"},
        one_of=("to_zone", "next_hop", "ask_again"),
    ),
    _change(requests.Bounce, "Bounce deliveries: fail them and send a DSN"),
    _change(requests.Drop, "Remove deliveries without a DSN"),
    Operation(
        request=requests.Acts,
        reply=answers.ActRow,
        shape=ResponseKind.ROWS,
        help="List the changes of the last 24 hours, newest first",
        merge=_ACTS,
        path="/v1/acts",
        wrapped="acts",
    ),
    Operation(
        request=requests.ActShow,
        reply=answers.ActRow,
        help="Show one change",
        merge=_ACTS,
        path="/v1/acts/{act}",
        called="",
    ),
    Operation(
        request=requests.Undo,
        reply=answers.ChangeResult,
        help="Revert one change of the last 24 hours",
        merge=structs.replace(CHANGED, partial=True),
        scope="operate",
        method="POST",
        path="/v1/acts/{undoes}/undo",
        wrapped="changed",
        completes=True,
    ),
    Operation(
        request=requests.Orders,
        reply=answers.OrderRow,
        shape=ResponseKind.ROWS,
        help="List the active suspensions and hold rules",
        merge=_ORDERS,
        path="/v1/orders",
        called="suspend",
        wrapped="orders",
    ),
    Operation(
        request=requests.Suspend,
        reply=answers.OrderResult,
        help="Suspend queued and new mail",
        merge=Merge(least="first_expiry", rows={"order": _ORDERS}, in_turn="always"),
        scope="operate",
        method="POST",
        path="/v1/suspend",
        completes=True,
    ),
    Operation(
        request=requests.Resume,
        reply=answers.OrdersResult,
        help="End suspensions and release the mail that they held",
        merge=Merge(add="released", rows={"orders": _ORDERS}),
        scope="operate",
        method="POST",
        path="/v1/resume",
        completes=True,
    ),
    Operation(
        request=requests.Explain,
        reply=answers.Explanation,
        help="Show the route of mail for an address without sending any",
        # Explanations differ only in what each worker has observed.
        merge=Merge(
            worst="suspended_until",
            rows={"hosts": Merge(key="name port", rows={"addresses": Merge(key="address", join="learned")})},
        ),
        method="POST",
        path="/v1/explain",
    ),
    Operation(
        request=requests.Resolve,
        reply=answers.ResolvedAddress,
        shape=ResponseKind.ROWS,
        help="Find the addresses behind a pseudonym in the queue",
        merge=Merge(key="address"),
        scope="operate",
        path="/v1/resolve",
        wrapped="addresses",
        audited=True,
    ),
    Operation(
        request=requests.HistoryFind,
        help="Find messages in the history, newest last",
        merge=ALONE,
        path="/v1/history",
        called="log find",
    ),
    Operation(
        request=requests.HistoryShow,
        help="Show all recorded events of a message",
        merge=ALONE,
        path="/v1/history/{message_id}",
        called="log show",
    ),
    Operation(
        request=requests.ConfigShow,
        help="Show the configuration of the running relay",
        merge=ALONE,
        path="/v1/config",
        called="",
    ),
    Operation(
        request=requests.Tail,
        reply=MailEvent,
        shape=ResponseKind.STREAM,
        help="Show mail events as they happen",
        merge=LIVE,
        path="/v1/tail",
    ),
    Operation(
        request=requests.Transcript,
        reply=TranscriptLine,
        shape=ResponseKind.STREAM,
        help="Show the protocol lines of sessions as they are sent",
        merge=LIVE,
        scope="operate",
        path="/v1/transcript",
        one_of=("client", "domain", "message_id"),
    ),
    Operation(
        request=requests.SpoolAcknowledge,
        reply=answers.LossDismissal,
        help="Dismiss a reported spool loss",
        merge=FIRST_FOUND,
        scope="operate",
        method="POST",
        path="/v1/spool/acknowledge",
        completes=True,
        audited=True,
    ),
    Operation(
        request=requests.WebhookList,
        reply=answers.WebhookRow,
        shape=ResponseKind.ROWS,
        help="List the webhooks and their queued events",
        merge=Merge(key="name", add="queued delivered", least="oldest", worst="state"),
        path="/v1/webhooks",
        wrapped="webhooks",
    ),
    Operation(
        request=requests.WebhookTest,
        reply=answers.WebhookTestResult,
        help="Post a webhook.test event now and print the response",
        merge=FIRST_FOUND,
        scope="operate",
        method="POST",
        path="/v1/webhooks/{name}/test",
        audited=True,
    ),
    Operation(
        request=requests.WebhookReplay,
        reply=answers.WebhookReplayResult,
        help="Retry queued events now, even if the endpoint is disabled",
        merge=Merge(add="queued"),
        scope="operate",
        method="POST",
        path="/v1/webhooks/{name}/replay",
        completes=True,
        audited=True,
    ),
    Operation(
        request=requests.Ping,
        reply=answers.Pong,
        help="Check whether a relay responds",
        merge=ALONE,
        path="/v1/ping",
        called="",
    ),
    Operation(
        request=requests.PartMetrics,
        reply=answers.MetricFamilies,
        help="Return the metrics of a worker",
        merge=WORKER,
        called="",
    ),
    Operation(
        request=requests.PartReadiness,
        reply=answers.UnreadyReasons,
        help="Return the reasons why a worker does not accept mail",
        merge=WORKER,
        called="",
    ),
)

BY_REQUEST: dict[type[msgspec.Struct], Operation] = {each.request: each for each in OPERATIONS}
BY_NAME: dict[str, Operation] = {each.name: each for each in OPERATIONS}


def operation_of(request: msgspec.Struct) -> Operation:
    return BY_REQUEST[type(request)]


if TYPE_CHECKING:
    AnyRequest = requests.Request
else:
    AnyRequest = Union[tuple(BY_REQUEST)]  # noqa: UP007 - made of the table


class OperationCall(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """A request with the handler that processes it. A supervisor sends it to its workers as one line of JSON.

    `caller` is the person who makes the request, for the log. A supervisor gives the same `id` and the same
    request time `at` to all workers; "" and 0 mean that the worker uses its own. With `clear` the caller may
    see addresses in place of the pseudonyms that the relay knows in memory.
    """

    request: AnyRequest
    caller: str = ""
    clear: bool = False
    id: str = ""
    at: float = 0.0


MAX_CALL = 2 * 1024 * 1024
"""Bytes of a call as a line."""


def decode_call(line: bytes) -> OperationCall:
    """Decode a call. Raise InvalidError if it is not valid."""
    try:
        return msgspec.json.decode(line, type=OperationCall)
    except msgspec.DecodeError as error:
        raise InvalidError(f"not a request: {error}") from error
