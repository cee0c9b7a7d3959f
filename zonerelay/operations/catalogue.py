"""Defines all operations that operators can request, with their HTTP paths and merge rules.

A new operation consists of an entry here with its request and reply, a method in `control/handler`, a view in
`cli/`, and a test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Union

import msgspec
from msgspec import structs

from zonerelay.model.delivery import queues_of
from zonerelay.model.envelope import MessageId, is_row
from zonerelay.operations import answers, requests
from zonerelay.operations.errors import InvalidError
from zonerelay.operations.operation import ALONE, FIRST_FOUND, LIVE, Merge, MergeRule, Operation, ResponseKind
from zonerelay.telemetry.events.records import MailEvent, TraceStep, TranscriptLine

_MESSAGE = "/v1/queue/messages/{message_id}"


def _delivery_order(
    request: requests.QueueList | requests.QueueCount, row: answers.DeliveryRow
) -> tuple[object, ...]:
    """Return the key by which workers sort deliveries: by queue, then by message id (the oldest first), with
    the outbox last. Pages depend on this order. The queues of one zone are listed by priority.
    """
    zone = request.filter.zone
    queues = () if zone is None else queues_of(zone)
    place = queues.index(row.queue) if row.queue in queues else 0
    return place, is_row(MessageId(row.message_id)), row.queue, row.message_id, row.recipient


CHANGED = Merge(add="matched changed busy gone altered", first="act", join="no_undo note")
"""The rule for changes of separate queues. `supervisor/merge` has the one for a shared queue."""
_ORDERS = Merge(key="id", add="held refused", order=lambda _, row: -row.since)
_ACTS = Merge(
    key="act", add="changed", least="at until finished no_undo undone_by", order=lambda _, row: -row.at
)
_WORKER = Merge(how=MergeRule.WORKER)
_SAMPLE = Merge(how=MergeRule.IN_ORDER, order=_delivery_order, limit="sample")


def _read(
    request: type[requests.Request],
    reply: type[msgspec.Struct] | None,
    merge: Merge,
    *,
    path: str | None = None,
    rows: str = "",
    **more: Any,
) -> Operation:
    """Define an operation that requires the scope `read`, unless `more` has another one. Its path is its name
    unless it is given. If `rows` is given, the response consists of rows, in the JSON member of this name.
    """
    if path is None:
        path = f"/v1/{str(request.__struct_config__.tag).replace('-', '/', 1)}"
    if rows:
        more |= {"shape": ResponseKind.ROWS, "wrapped": rows}
    return Operation(request=request, reply=reply, merge=merge, path=path, **more)


def _write(
    request: type[requests.Request],
    reply: type[msgspec.Struct],
    merge: Merge,
    *,
    completes: bool = True,
    **more: Any,
) -> Operation:
    """Define an operation that requires the scope `operate` and is requested with POST."""
    return _read(request, reply, merge, scope="operate", method="POST", completes=completes, **more)


def _change(request: type[requests.QueueChange], **more: Any) -> Operation:
    rule = structs.replace(CHANGED, in_turn="shared")
    return _write(request, answers.ChangeResult, rule, wrapped="changed", preview=True, **more)


OPERATIONS: tuple[Operation, ...] = (
    _read(requests.Status, answers.RelayStatus, Merge()),
    _read(
        requests.QueueList,
        answers.DeliveryRow,
        Merge(how=MergeRule.IN_ORDER, order=_delivery_order, of_queue=True),
        path="/v1/queue",
        rows="deliveries",
    ),
    _read(requests.QueueCount, answers.Count, Merge(add="matched", rows={"sample": _SAMPLE}, of_queue=True)),
    _read(requests.QueueSummary, answers.Summary, Merge(of_queue=True), wrapped="summary"),
    _read(requests.QueueShow, answers.MessageDetail, FIRST_FOUND, path=_MESSAGE),
    _read(requests.QueueTrace, TraceStep, FIRST_FOUND, path=f"{_MESSAGE}/trace", rows="steps"),
    _read(
        requests.QueueCat,
        answers.MessageBody,
        FIRST_FOUND,
        path=f"{_MESSAGE}/body",
        shape=ResponseKind.BODY,
        scope="operate",
    ),
    _read(
        requests.QueueExplain,
        answers.Explanation,
        FIRST_FOUND,
        path=f"{_MESSAGE}/explain",
        rows="explanations",
        called="explain",
    ),
    _change(requests.Retry),
    _change(requests.Hold),
    _change(requests.Release),
    _change(
        requests.Reroute, flags={"filter.zone": "--from-zone"}, one_of=("to_zone", "next_hop", "ask_again")
    ),
    _change(requests.Bounce),
    _change(requests.Drop),
    _read(requests.Acts, answers.ActRow, _ACTS, rows="acts"),
    _read(requests.ActShow, answers.ActRow, _ACTS, path="/v1/acts/{act}", called=""),
    _write(requests.Undo, answers.ChangeResult, CHANGED, path="/v1/acts/{undoes}/undo", wrapped="changed"),
    _read(requests.Orders, answers.OrderRow, _ORDERS, rows="orders", called="suspend"),
    _write(
        requests.Suspend,
        answers.OrderResult,
        Merge(least="first_expiry", rows={"order": _ORDERS}, in_turn="always"),
    ),
    _write(requests.Resume, answers.OrdersResult, Merge(add="released", rows={"orders": _ORDERS})),
    # Explanations differ only in what each worker has observed.
    _read(
        requests.Explain,
        answers.Explanation,
        Merge(
            worst="suspended_until",
            rows={"hosts": Merge(key="name port", rows={"addresses": Merge(key="address", join="learned")})},
        ),
        method="POST",
    ),
    _read(
        requests.Resolve,
        answers.ResolvedAddress,
        Merge(key="address"),
        rows="addresses",
        scope="operate",
        audited=True,
    ),
    _read(requests.HistoryFind, None, ALONE, path="/v1/history", called="log find"),
    _read(requests.HistoryShow, None, ALONE, path="/v1/history/{message_id}", called="log show"),
    _read(requests.ConfigShow, None, ALONE, path="/v1/config", called=""),
    _read(requests.Tail, MailEvent, LIVE, shape=ResponseKind.STREAM),
    _read(
        requests.Transcript,
        TranscriptLine,
        LIVE,
        shape=ResponseKind.STREAM,
        scope="operate",
        one_of=("client", "domain", "message_id"),
    ),
    _write(requests.SpoolAcknowledge, answers.LossDismissal, FIRST_FOUND, audited=True),
    _read(
        requests.WebhookList,
        answers.WebhookRow,
        Merge(key="name", add="queued delivered", least="oldest", worst="state"),
        path="/v1/webhooks",
        rows="webhooks",
    ),
    _write(
        requests.WebhookTest,
        answers.WebhookTestResult,
        FIRST_FOUND,
        path="/v1/webhooks/{name}/test",
        completes=False,
        audited=True,
    ),
    _write(
        requests.WebhookReplay,
        answers.WebhookReplayResult,
        Merge(add="queued"),
        path="/v1/webhooks/{name}/replay",
        audited=True,
    ),
    _read(requests.Ping, answers.Pong, ALONE, called=""),
    _read(requests.PartMetrics, answers.MetricFamilies, _WORKER, path="", called=""),
    _read(requests.PartReadiness, answers.UnreadyReasons, _WORKER, path="", called=""),
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
    """A request and its caller, as passed to the handler of the operation. A supervisor sends it to its
    workers as one line of JSON.

    `caller` is the name of the client for the log. A supervisor gives the same `id` and the same request time
    `at` to all workers; "" and 0 mean that the worker uses its own. With `clear` the caller may see addresses
    in place of the pseudonyms that the relay knows in memory.
    """

    request: AnyRequest
    caller: str = ""
    clear: bool = False
    id: str = ""
    at: float = 0.0


MAX_CALL = 2 * 1024 * 1024
"""Bytes of a call as a line."""


def decode_call(line: bytes) -> OperationCall:
    """Decode a call, which is one line of JSON. Raise InvalidError if it is not valid."""
    try:
        return msgspec.json.decode(line, type=OperationCall)
    except msgspec.DecodeError as error:
        raise InvalidError(f"not a request: {error}") from error
