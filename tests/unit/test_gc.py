"""What may hold the event loop: reference cycles, threads, and tasks that an object owns."""

import ast
import asyncio
import gc
import inspect
import io
import re
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import zonerelay
from tests.support.source import tree_of
from zonerelay.config.settings import RetrySettings
from zonerelay.process import gc as gc_rounds
from zonerelay.process.gc import GROWN, IDLE_AFTER, IDLE_STEP, STEP, Collection, GcSchedule, GcTimer, collect
from zonerelay.process.tasks import Tasks, completed
from zonerelay.process.threads import PoolBusyError, ThreadPool
from zonerelay.queue.destination.destinations import Destination, Site
from zonerelay.routing.destinations.route import DestinationLimits, MxHost, Route
from zonerelay.routing.dns.answers import DnsAnswer, DnsStatus, MxRecord, TlsaRecord

BLOCKS = 1_000_000
MADE = 60_000


@pytest.fixture
def _as_before() -> Iterator[None]:
    gc.collect()
    yield
    gc.freeze()


@pytest.fixture
async def rounds(_as_before: None) -> AsyncIterator[GcTimer]:
    rounds = GcTimer()
    rounds.start()
    yield rounds
    rounds.stop()


def after(seconds: float, *, busy: bool, blocks: int = BLOCKS) -> Collection:
    """What is looked at so long after a look at all, with as many allocated blocks."""
    rounds = GcSchedule(now=0.0, cpu=0.0, blocks=BLOCKS)
    return rounds.next(now=seconds, cpu=0.09 if busy else 0.0001, blocks=blocks)


@pytest.mark.parametrize("busy", [False, True])
def test_what_has_stayed_for_two_seconds_is_settled(busy: bool) -> None:
    assert after(gc_rounds.SETTLE_AFTER - 1, busy=busy) is Collection.YOUNG
    assert after(gc_rounds.SETTLE_AFTER, busy=busy) is Collection.SETTLE
    rounds = GcSchedule(now=0.0, cpu=0.0, blocks=BLOCKS)
    found = [rounds.next(now=float(n), cpu=float(n), blocks=BLOCKS) for n in range(1, 8)]
    assert [n for n, look in enumerate(found, 1) if look is Collection.SETTLE] == [2, 4, 6]


def test_a_memory_that_does_not_grow_is_never_looked_at_as_a_whole() -> None:
    for busy in (False, True):
        assert after(1e9, busy=busy) is Collection.SETTLE


def test_an_idle_loop_looks_at_a_memory_that_has_grown_a_little() -> None:
    grown = int(BLOCKS * 1.1) + gc_rounds.IDLE_GROWN + 1
    assert after(IDLE_AFTER, busy=False, blocks=grown) is Collection.WHOLE
    assert after(IDLE_AFTER - 1, busy=False, blocks=grown) is Collection.SETTLE
    assert after(IDLE_AFTER, busy=False, blocks=grown - 1) is Collection.SETTLE
    assert after(IDLE_AFTER, busy=True, blocks=grown) is Collection.SETTLE


def test_a_loop_that_has_nothing_to_do_is_woken_seldom() -> None:
    rounds = GcSchedule(now=0.0, cpu=0.0, blocks=BLOCKS)
    found = []
    for n, cpu in enumerate([0.05, 0.0501, 0.0502, 0.09], 1):
        rounds.next(now=n / 10, cpu=cpu, blocks=BLOCKS)
        found.append(rounds.pause)
    assert found == [STEP, IDLE_STEP, IDLE_STEP, STEP]


def test_memory_that_grows_is_looked_at_at_once_and_then_not_before_it_has_grown_again() -> None:
    assert after(1, busy=True, blocks=int(BLOCKS * 1.5) + GROWN + 1) is Collection.WHOLE
    assert after(1, busy=True, blocks=int(BLOCKS * 1.5) + GROWN) is Collection.YOUNG
    rounds = GcSchedule(now=0.0, cpu=0.0, blocks=BLOCKS)
    rounds.looked_at_all(now=1.0, blocks=2 * BLOCKS)
    assert rounds.next(now=1.5, cpu=2.0, blocks=3 * BLOCKS) is Collection.YOUNG
    assert rounds.next(now=3.0, cpu=3.0, blocks=4 * BLOCKS) is Collection.WHOLE


class Node:
    """One end of a cycle."""

    other: "Node | None" = None


def cycle() -> tuple[Node, weakref.ref[Node]]:
    one, two = Node(), Node()
    one.other, two.other = two, one
    return one, weakref.ref(two)


@pytest.mark.usefixtures("_as_before")
def test_a_cycle_that_was_settled_is_found_by_a_look_at_all() -> None:
    used, settled = cycle()
    collect(Collection.SETTLE)
    unused = cycle()[1]
    del used
    collect(Collection.SETTLE)
    assert unused() is None
    assert settled() is not None
    collect(Collection.WHOLE)
    assert settled() is None


async def test_a_queue_that_frees_as_much_as_it_makes_does_not_pile_up_young_objects(rounds: GcTimer) -> None:
    """By its counts alone the interpreter never looked, and then at everything in one go."""
    waiting: deque[list[int]] = deque(([] for _ in range(MADE)), maxlen=MADE)
    rounds._step(asyncio.get_running_loop())
    waiting.extend([] for _ in range(MADE))
    assert len(gc.get_objects(generation=0)) > MADE // 2
    rounds._step(asyncio.get_running_loop())
    assert len(gc.get_objects(generation=0)) < 1000


async def test_what_a_reload_makes_is_settled_without_a_look(rounds: GcTimer) -> None:
    looks: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        looks.append(info["generation"])

    with rounds.waiting():
        gc.callbacks.append(note)
        made: list[list[int]] = [[] for _ in range(1000)]
        rounds._step(asyncio.get_running_loop())
        gc.callbacks.remove(note)
    assert not looks
    assert not any(each is made for each in gc.get_objects())
    rounds._step(asyncio.get_running_loop())


@pytest.mark.usefixtures("_as_before")
async def test_rounds_that_are_stopped_leave_the_interpreter_as_it_was() -> None:
    before = gc.get_threshold()
    rounds = GcTimer()
    rounds.stop()
    rounds.start()
    assert gc.get_threshold() != before
    rounds.stop()
    assert gc.get_threshold() == before


# What there are tens of thousands of is nothing to the garbage collector, which holds the loop meanwhile


def test_what_there_are_many_of_is_nothing_to_the_garbage_collector() -> None:
    mail = DnsAnswer(DnsStatus.OK, tuple(MxRecord(10, name) for name in ("a.example", "b.example")), 1.0)
    text = DnsAnswer(DnsStatus.OK, ("v=STSv1; id=1",), 1.0)
    pinned = DnsAnswer(DnsStatus.OK, (TlsaRecord(3, 1, 1, b"x"),), 1.0)
    cache = {("a", "MX"): mail, ("a", "TXT"): text, ("a", "TLSA"): pinned}
    hosts, limits = (MxHost("mx.example.com", 25),), DestinationLimits(10, 50, 100)
    route = Route("default", "example.com", hosts, 1.0)
    destination = Destination(route, Site(route.site), RetrySettings())
    destination.domains["example.com"] = None
    gc.collect()
    for thing in (
        *(mail, mail.records, mail.records[0], text, text.records, pinned, pinned.records, cache),
        *(hosts, hosts[0], limits, route, destination.suspension, destination.domains),
    ):
        assert not gc.is_tracked(thing)


# Threads and tasks: no work shares the loop's default executor, and an object owns its tasks


ROOT = Path(zonerelay.__file__).parent

THREAD_BEHIND = {
    "to_thread",  # the default executor
    "getaddrinfo",  # of a loop: the default executor, or libuv's four threads
    "getnameinfo",
    "FileResponse",  # aiohttp reads the file in the default executor
    "StaticResource",
    "add_static",
    "static",
    "ThreadedResolver",
    "DefaultResolver",
    "open_connection",  # resolves the name
    "sendfile",
}
ON_A_SOCKET = {"create_connection", "create_datagram_endpoint"}
"""Names of both a loop's methods and functions of `socket`: a loop's may take a host's name."""


_ANY = re.compile(
    "|".join((*THREAD_BEHIND, *ON_A_SOCKET, "run_in_executor", "TCPConnector", "create_server"))
)


def uses_of_the_default_executor(source: str) -> Iterator[tuple[int, str]]:
    if not _ANY.search(source):  # quicker than a tree
        return
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.ImportFrom) and node.module in ("asyncio", "aiohttp", "aiohttp.resolver"):
            yield from ((node.lineno, each.name) for each in node.names if each.name in THREAD_BEHIND)
        if isinstance(node, ast.Attribute) and node.attr in THREAD_BEHIND and not _of_socket(node):
            yield node.lineno, node.attr
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            named = {each.arg for each in node.keywords}
            if node.func.attr in ON_A_SOCKET and "sock" not in named and not _of_socket(node.func):
                yield node.lineno, node.func.attr
            first = node.args[0] if node.args else None
            if node.func.attr == "run_in_executor" and (
                first is None or (isinstance(first, ast.Constant) and first.value is None)
            ):
                yield node.lineno, "run_in_executor(None, …)"
            if node.func.attr == "TCPConnector" and "resolver" not in named:
                yield node.lineno, "TCPConnector without a resolver"
            if node.func.attr == "create_server" and "sock" not in named and named & {"host", "ssl"}:
                yield node.lineno, "create_server that may resolve a name"


def _of_socket(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("socket", "os")


@pytest.mark.parametrize(
    "source",
    [
        "await asyncio.to_thread(f)",
        "from asyncio import to_thread",
        "await loop.run_in_executor(None, f)",
        "await loop.run_in_executor(executor=None, func=f)",
        "await loop.getaddrinfo('host', 25)",
        "await asyncio.get_running_loop().create_connection(P, 'host', 25)",
        "await asyncio.open_connection('host', 25)",
        "web.FileResponse(path)",
        "aiohttp.TCPConnector(ssl=context)",
    ],
)
def test_the_walk_finds_each_way_to_the_default_executor(source: str) -> None:
    assert list(uses_of_the_default_executor(source))


def test_nothing_uses_the_default_executor() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in sorted(ROOT.rglob("*.py"))
        for line, what in uses_of_the_default_executor(path.read_text())
    ]
    assert found == [], "take a pool of zonerelay/process/threads.py"


async def test_calls_beyond_the_bound_are_refused_at_once_and_places_come_back() -> None:
    pool, go = ThreadPool("test", 1, most=2), threading.Event()
    first = asyncio.create_task(pool.run(go.wait))
    second = asyncio.create_task(pool.run(go.wait))
    await asyncio.sleep(0)
    with pytest.raises(PoolBusyError):
        await pool.run(go.wait)
    second.cancel()  # it waits for a thread, so its place is free at once
    await asyncio.wait({second})
    third = asyncio.create_task(pool.run(go.wait))
    await asyncio.sleep(0)
    with pytest.raises(PoolBusyError):
        await pool.run(go.wait)
    go.set()
    assert list(await asyncio.gather(first, third)) == [True, True]
    assert await pool.run(lambda: "again") == "again"


async def test_a_cancelled_call_counts_until_its_thread_has_ended() -> None:
    pool, began, go = ThreadPool("test", 1, most=1), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        go.wait()

    call = asyncio.create_task(pool.run(work))
    while not began.is_set():
        await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait({call})
    with pytest.raises(PoolBusyError):
        await pool.run(work)
    go.set()


async def test_what_is_to_be_completed_outlasts_every_cancellation() -> None:
    go, done = asyncio.Event(), list[str]()

    async def work() -> None:
        await go.wait()
        done.append("all")

    call = asyncio.create_task(completed(work()))
    for _ in range(3):
        await asyncio.sleep(0)
        call.cancel()
    await asyncio.sleep(0)
    go.set()
    await asyncio.wait({call})
    assert (call.cancelled(), done) == (True, ["all"])


@pytest.mark.parametrize("times", [1, 2])
async def test_what_a_cancelled_call_opens_is_closed(times: int) -> None:
    pool, began, go, file = ThreadPool("test", 1), threading.Event(), threading.Event(), io.StringIO()

    def work() -> io.StringIO:
        began.set()
        go.wait()
        return file

    call = asyncio.create_task(pool.open(work))
    while not began.is_set():
        await asyncio.sleep(0)
    for _ in range(times):
        call.cancel()
        await asyncio.sleep(0)
    go.set()
    await asyncio.wait({call})
    assert (call.cancelled(), file.closed) == (True, True)
    with pytest.raises(ZeroDivisionError):
        await pool.open(lambda: io.StringIO("x" * (1 // 0)))


async def test_an_error_of_the_function_is_the_callers_and_frees_the_place() -> None:
    pool = ThreadPool("test", 1, most=1)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            await pool.run(lambda: 1 / 0)


def test_the_pools_of_mail_are_not_those_of_operators() -> None:
    from zonerelay.admin import http, http_server, mailpit
    from zonerelay.admin.page import page, views, visitor
    from zonerelay.process import threads

    of_mail = ("ACCESS", "STORE", "CAPTURE", "LOGIN", "DROP", "NAMES")
    for module in (http, http_server, mailpit, page, views, visitor):
        names = {name for name in of_mail if f"{name}.run(" in inspect.getsource(module)}
        assert not names, module.__name__
    pools = [each for each in vars(threads).values() if isinstance(each, ThreadPool)]
    assert len({id(each) for each in pools}) == len(pools)


# Tasks that an object owns


async def test_a_drain_ends_when_the_tasks_had_ended_before_it_began() -> None:
    """The loop has not called back yet: it would wait for that for ever, and nothing else had a turn."""
    tasks = Tasks()
    await tasks.start(asyncio.sleep(0))
    tasks._running.add(task := asyncio.create_task(asyncio.sleep(0)))
    await task  # it is never discarded by a callback, as one that had no turn yet
    async with asyncio.timeout(5):
        await tasks.wait()


async def test_a_drain_waits_for_what_is_started_meanwhile() -> None:
    tasks, ended = Tasks(), []

    async def second() -> None:
        await asyncio.sleep(0.01)
        ended.append(2)

    async def first() -> None:
        await asyncio.sleep(0.01)
        tasks.start(second())

    tasks.start(first())
    await tasks.wait()
    assert ended == [2]
