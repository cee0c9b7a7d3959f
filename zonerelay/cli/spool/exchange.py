"""`zonerelay spool export` and `spool import`: exchange mail as files, also with other mail systems.

Both exit with 0 if every selected message has been written, with 1 if some could not be written or the disk
or the store failed, and with 2 if nothing could be started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from msgspec import structs

from zonerelay.cli.arguments import request_of
from zonerelay.cli.relay import load_settings
from zonerelay.cli.spool.stopped import opened, spools, stopped
from zonerelay.cli.terminal import output, text
from zonerelay.cli.terminal.exits import FAILED, OK, USAGE, CliError, refused
from zonerelay.config.settings import Settings, SpoolSettings
from zonerelay.control.acts import queue_filter
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message
from zonerelay.operations.requests import QueueCount
from zonerelay.queue.operator.filters import FilterMatcher
from zonerelay.queue.orders.order import Order, OrderTable, Subject
from zonerelay.queue.orders.orders import OrdersError, OrdersFile
from zonerelay.routing.zones.zones import Zones
from zonerelay.store.contract import QueueView, Store, StoreError
from zonerelay.store.spool_paths import is_shared
from zonerelay.transfer import export, files, others
from zonerelay.transfer.loader import ImportRegister, ImportResult, Loader
from zonerelay.transfer.stored import Source, TransferError, UnusableMessage

_BRACKETS = str.maketrans("", "", "[] ")


class MailCounts(msgspec.Struct):
    """What was written. `unusable` counts messages that could not be."""

    messages: int = 0
    deliveries: int = 0
    unusable: int = 0


class ExportResult(MailCounts):
    """The result of `spool export --json`. `suspended` counts deliveries that were exported as held."""

    suspended: int = 0


def export_to(arguments: Namespace) -> int:
    settings = load_settings(arguments.config)
    target: Path = arguments.path.absolute()
    now = time.time()
    matcher = FilterMatcher(queue_filter(request_of(arguments, QueueCount).filter), now)
    with stopped(settings), _translated("nothing was written"), files.writing(target) as target_files:
        done = asyncio.run(_export(settings, matcher, now, target_files, target.parent))
    words = f"{text.plural(done.messages, 'message')} with {text.deliveries(done.deliveries)} in {target}."
    if done.suspended:
        words += (
            f"\n{text.deliveries(done.suspended)} of them are suspended by operators, and will be held "
            "where they are imported; release them with: zonerelay queue release"
        )
    output.print_answer(done, words, as_json=arguments.json)
    return FAILED if done.unusable else OK


async def _export(
    settings: Settings, matcher: FilterMatcher, now: float, target: files.Target, place: Path
) -> ExportResult:
    done = ExportResult()
    octets = 0
    for worker in spools(settings.spool):
        async with opened(settings, worker) as store:
            octets += (await export.survey(store, matcher, now)).octets
    check_room(octets, place, 0)
    suspending = _suspending(settings, now)

    def held(message: Message, delivery: Delivery) -> Delivery:
        if delivery.held or (order := suspending(message, delivery)) is None:
            return delivery
        done.suspended += 1
        return structs.replace(delivery, held=True, act=order.id)

    for worker in spools(settings.spool):
        async with opened(settings, worker) as store:
            await write_mail("Exporting", store, matcher, now=now, target=target, done=done, change=held)
    return done


async def write_mail(
    title: str,
    store: QueueView,
    matcher: FilterMatcher,
    *,
    now: float,
    target: files.Target,
    done: MailCounts,
    change: Callable[[Message, Delivery], Delivery] = lambda _, delivery: delivery,
) -> None:
    """Write the matching mail of one store, and report the progress and each message that cannot be
    written.
    """
    meant = await export.survey(store, matcher, now)
    with output.progress(title) as reach:

        def saw(deliveries: int, skipped: UnusableMessage | None) -> None:
            done.messages += deliveries > 0
            done.deliveries += deliveries
            if skipped is not None:
                done.unusable += 1
                _tell(skipped)
            reach(done.messages, max(len(meant.ids), done.messages))

        await export.export(store, meant, matcher, now, target, saw=saw, change=change)


def _suspending(settings: Settings, now: float) -> Callable[[Message, Delivery], Order | None]:
    """Return a function that finds the suspension which keeps mail from being sent. The relay that imports
    the mail may not have these suspensions. The MX hosts of a domain are not known here, so a suspension of
    any destination may apply to it.
    """
    orders = OrdersFile(settings.spool.path.parent).read()
    at_hops = OrderTable(orders, now)
    at_mx = OrderTable([msgspec.structs.replace(each, destination=None) for each in orders], now)
    hops = {zone.name: zone.next_hop.translate(_BRACKETS) for zone in settings.zone}

    def suspending(message: Message, delivery: Delivery) -> Order | None:
        envelope, hop = message.envelope, hops.get(delivery.zone, "")
        mail = Subject(
            delivery.zone,
            delivery.recipient,
            envelope.sender,
            envelope.origin.user,
            hop or delivery.domain,
            hop,
        )
        return (at_hops if hop else at_mx).holding(mail, delivery.act)

    return suspending


def import_from(arguments: Namespace) -> int:
    settings = load_settings(arguments.config)
    with (
        stopped(settings) as home,
        _translated("everything done so far is kept; run the command again to continue"),
    ):
        done = asyncio.run(_import_from(settings, arguments.system, arguments.place, home))
    words = f"{text.plural(done.messages, 'message')} with {text.deliveries(done.deliveries)} imported."
    if done.already:
        words += f"\n{text.deliveries(done.already)} imported before, or in the spool already: left alone."
    output.print_answer(done, words, as_json=arguments.json)
    return FAILED if done.unusable else OK


async def _import_from(settings: Settings, system: str | None, place: str, home: Path) -> ImportResult:
    now = time.time()
    if system is None:
        # A backup includes the suspensions for its mail, and so does a restore.
        OrdersFile(home).merge(OrdersFile(Path(place).absolute().parent / "home").read(), now)
        with files.reading(Path(place)) as source:
            return await _import(settings, source, home, now)
    async with others.reading(system, place, now) as source:
        return await _import(settings, source, home, now)


async def _import(settings: Settings, source: Source, home: Path, now: float) -> ImportResult:
    if not is_shared(settings.spool):
        place = settings.spool.path if settings.spool.path.exists() else home
        check_room(
            source.octets + export.DESCRIPTION_SIZE * source.messages, place, settings.spool.min_free_space
        )
    register = ImportRegister(home)
    async with opened(settings) as store:
        with loading("Importing", settings, store, register, messages=source.messages, now=now) as loader:
            await loader.load(source)
    return loader.loaded


@contextlib.contextmanager
def loading(
    text: str, settings: Settings, store: Store, register: ImportRegister, *, messages: int, now: float
) -> Iterator[Loader]:
    """Yield a loader that reports the progress and each message that cannot be imported."""
    with output.progress(text) as reach:
        seen = 0

        def saw(skipped: UnusableMessage | None) -> None:
            nonlocal seen
            seen += 1
            if skipped is not None:
                _tell(skipped)
            reach(seen, max(seen, messages))

        yield Loader(store, register, Zones(settings.zone, settings.route), now=now, saw=saw)


def _tell(skipped: UnusableMessage) -> None:
    output.chatter().print(f"{skipped.name}: not taken: {skipped.why}")


@contextlib.contextmanager
def _translated(consequence: str) -> Iterator[None]:
    """Convert errors of the store and of the exchange to CliError."""
    with (
        refused(StoreError, OSError, after=f"; {consequence}"),
        refused(TransferError, OrdersError, status=USAGE),
    ):
        yield


def check_rooms(spool: SpoolSettings, mail: int, beside: int) -> None:
    """Raise CliError if the mail and the other files (sizes in bytes) do not fit on their disks."""
    home, guard = spool.path.parent, spool.min_free_space
    place = spool.path if spool.path.exists() else home
    if place.stat().st_dev == home.stat().st_dev:
        check_room(mail + beside, place, guard)
    else:
        check_room(mail, place, guard)
        check_room(beside, home, guard)


def check_room(needed: int, place: Path, guard: int) -> None:
    """Raise CliError if there is not enough free space for `needed` bytes."""
    usage = os.statvfs(place)
    free = max(usage.f_bavail * usage.f_frsize - guard, 0)
    if needed > free:
        beside = f" in addition to the {text.size(guard)} of min_free_space" if guard else ""
        raise CliError(
            f"{place} requires {text.size(needed)}, but only {text.size(free)} are free{beside}", USAGE
        )
