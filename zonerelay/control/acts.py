"""Applies operators' changes to the queue of a worker, each with its own id, and undoes them.

A change is in the journal before it changes any mail. One event reports its end, even if it ends half-way.
"""

import secrets
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime

import msgspec
from msgspec import structs

from zonerelay.model.envelope import MessageId
from zonerelay.operations import requests
from zonerelay.operations.answers import ActRow, ChangeResult
from zonerelay.operations.catalogue import OperationCall
from zonerelay.operations.errors import ControlError, InvalidError, NotFoundError, UnavailableError
from zonerelay.queue.operator.filters import QueueFilter
from zonerelay.queue.operator.journal import KEPT, Act, JournalError
from zonerelay.queue.operator.operations import (
    ChangeCounts,
    ChangeRun,
    Operations,
    RerouteRun,
    VerbProgress,
    described,
)
from zonerelay.routing.zones.zones import Zones
from zonerelay.store.contract import StoreError

DEFAULT_REASON = "bounced by the operator"
FINAL = "bounced and purged mail has left the queue"
"""Why those acts cannot be undone."""
MAX_WAIT = 366 * 86_400.0


class OperatorActs:
    """Applies operators' changes to the queue of one worker, and undoes them."""

    def __init__(self, operations: Operations, zones: Zones) -> None:
        self._operations = operations
        self._journal, self._clock = operations.journal, operations.clock
        self._zones = zones

    async def change(
        self, request: requests.QueueChange, call: OperationCall, progress: VerbProgress
    ) -> ChangeResult:
        """Apply a change to the queue. Raise ControlError, JournalError or RerouteError if it is not possible
        or ends half-way.
        """
        if isinstance(request, requests.Retry) and (request.at or 0.0) > self._clock.now() + MAX_WAIT:
            raise InvalidError("the time of the retry must be within the next year", pointer="/at")
        rerouting = None
        if isinstance(request, requests.Reroute):
            rerouting = RerouteRun(
                self._zones, to_zone=request.to_zone, next_hop=request.next_hop, ask_again=request.ask_again
            )
        wanted = queue_filter(request.filter, request.message_ids)
        what = f"{described(wanted) or 'everything'}{_aim(request, rerouting)}"
        is_purge = isinstance(request, requests.Drop) and request.purge
        if len(wanted.message_ids or ()) == 1 and not is_purge:
            await self._operations.open_deliveries(*(wanted.message_ids or ()))
        is_final = isinstance(request, requests.Bounce) or is_purge
        act = Act(id="", at=0.0, verb=request.action, what=what, problem=FINAL if is_final else "")
        result = await self._carry_out(
            request, call, act, lambda act: self._do(request, wanted, rerouting, progress, act)
        )
        return result if rerouting is None else structs.replace(result, note=rerouting.note)

    async def _do(
        self,
        request: requests.QueueChange,
        wanted: QueueFilter,
        rerouting: RerouteRun | None,
        progress: VerbProgress,
        act: Act,
    ) -> ChangeCounts:
        verbs, run = self._operations, ChangeRun(progress=progress, act=act)
        match request:
            case requests.Retry():
                at = request.at or 0.0
                return await verbs.retry(wanted, at=at if at > self._clock.now() else 0.0, **run)
            case requests.Hold():
                return await verbs.hold(wanted, **run)
            case requests.Release():
                return await verbs.release(wanted, **run)
            case requests.Drop():
                return await verbs.drop(wanted, purge=request.purge, **run)
            case requests.Bounce():
                return await verbs.bounce(wanted, request.reason or DEFAULT_REASON, **run)
        assert rerouting is not None
        return await verbs.reroute(wanted, rerouting, **run)

    async def undo(self, request: requests.Undo, call: OperationCall, progress: VerbProgress) -> ChangeResult:
        """Undo an earlier change to the queue. Raise NotFoundError if the journal does not have it,
        ControlError if it cannot be undone, and StoreError if the store fails.
        """
        try:
            undone = await self._journal.find(request.undoes)
        except JournalError as error:
            raise NotFoundError(str(error)) from error
        if undone.problem:
            raise ControlError(f"change {undone.id} ({undone.verb}) cannot be undone: {undone.problem}")
        if undone.undone_by:
            note = f"change {undone.id} was already undone by change {undone.undone_by}"
            return ChangeResult(action="undo", matched=0, changed=0, busy=0, undoes=undone.id, note=note)
        if self._journal.is_running(undone.id):
            raise ControlError(
                f"change {undone.id} ({undone.verb}) is still running; undo it when it has ended"
            )
        what = f"change {undone.id}: {undone.verb} {undone.what}"

        async def revert(act: Act) -> ChangeCounts:
            counts = await self._operations.undo(undone, act, progress)
            if not counts.busy:  # otherwise the undo may be repeated
                await self._journal.mark_undone(undone.id, act.id)
            return counts

        act = Act(id="", at=0.0, verb="undo", what=what, undoes=undone.id)
        return await self._carry_out(request, call, act, revert)

    async def rows(self, limit: int) -> list[ActRow]:
        return [_row(act) for act in (await self._journal.acts())[:limit]]

    async def row(self, act_id: str) -> ActRow:
        """Find a change in the journal by its id, and return it as a row of a response. Raise NotFoundError
        if the journal does not have it.
        """
        for act in await self._journal.acts():
            if act.id == act_id:
                return _row(act)
        raise NotFoundError(f"no change {act_id} in the last 24 hours")

    async def _carry_out(
        self,
        request: requests.QueueChange | requests.Undo,
        call: OperationCall,
        act: Act,
        work: Callable[[Act], Awaitable[ChangeCounts]],
    ) -> ChangeResult:
        """Apply a change, and record its beginning and its end in the journal."""
        act_id, now = call.id or secrets.token_hex(4), self._clock.now()
        act = structs.replace(act, id=act_id, at=now, who=call.caller, reason=request.reason)
        await self._journal.begin(act)
        try:
            counts = await work(act)
        except BaseException as error:
            self._journal.break_off(act.id)
            if isinstance(error, StoreError):
                raise UnavailableError(
                    f"the spool: {error}; change {act.id} was only partly carried out"
                ) from error
            if isinstance(error, OSError):
                text = f"the journal of changes cannot be read or written: {error.strerror}"
                raise ControlError(text) from error
            raise
        act = await self._journal.finish(
            structs.replace(act, matched=counts.matched, changed=counts.changed, busy=counts.busy)
        )
        return ChangeResult(
            action=act.verb, act=act.id, no_undo=act.problem, undoes=act.undoes, **structs.asdict(counts)
        )


def queue_filter(wanted: requests.Filter, message_ids: Sequence[str] = ()) -> QueueFilter:
    """Convert the filter in a request to a `QueueFilter`. With `message_ids`, only deliveries of these
    messages match.
    """
    found = msgspec.convert(wanted, QueueFilter, from_attributes=True)
    own = [] if wanted.message_id is None else [wanted.message_id]
    if not own and not message_ids:
        return found
    meant = set(message_ids or own).intersection(own or message_ids)
    return structs.replace(found, message_ids=frozenset(map(MessageId, meant)))


def _aim(request: requests.QueueChange, rerouting: RerouteRun | None) -> str:
    if rerouting is not None:
        return f" to {rerouting.aim}"
    at = request.at if isinstance(request, requests.Retry) else None
    return f" at {datetime.fromtimestamp(at).astimezone().isoformat(' ', 'seconds')}" if at else ""


def _row(act: Act) -> ActRow:
    no_undo = act.problem or (f"undone by change {act.undone_by}" if act.undone_by else "")
    known = {"act": act.id, "action": act.verb, "until": act.at + KEPT, "no_undo": no_undo}
    return msgspec.convert(structs.asdict(act) | known, ActRow)
