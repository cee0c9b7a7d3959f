"""Threads and tasks: no work shares the loop's default executor, and an object owns its tasks."""

from __future__ import annotations

import ast
import asyncio
import inspect
import io
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import zonerelay
from tests.support.source import tree_of
from zonerelay.process.tasks import Tasks
from zonerelay.process.threads import PoolBusyError, ThreadPool

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


async def test_what_a_cancelled_call_opens_is_closed() -> None:
    pool, began, go, file = ThreadPool("test", 1), threading.Event(), threading.Event(), io.StringIO()

    def work() -> io.StringIO:
        began.set()
        go.wait()
        return file

    call = asyncio.create_task(pool.open(work))
    while not began.is_set():
        await asyncio.sleep(0)
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
    from zonerelay.admin import captured, http, http_server, mailpit
    from zonerelay.admin.page import page, views, visitor
    from zonerelay.process import threads

    of_mail = ("ACCESS", "STORE", "CAPTURE", "LOGIN", "DROP", "NAMES")
    for module in (captured, http, http_server, mailpit, page, views, visitor):
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
