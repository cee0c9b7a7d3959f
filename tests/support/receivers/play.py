"""All receivers of the cast in one process: `python -m tests.support.receivers.play PORT`.

Says "ready" when all of them listen; at the end of its input it writes its report and goes.
"""

import asyncio
import contextlib
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator

import msgspec
import uvloop

from tests.support.certificates import DAY, make
from tests.support.debian import REPOSITORY
from tests.support.receivers.cast import CAST, DEAD, EHLO_NAMES, ZONE_CONNECTIONS, Member
from tests.support.receivers.conversation import Crowd, Receiver
from tests.support.receivers.journal import Account, Report
from tests.support.receivers.ledger import Promise
from tests.support.receivers.nature import Tls

BEAT = 0.01


async def _listen(member: Member, port: int, everybody: Crowd) -> Receiver:
    nature, now = member.nature, time.time()
    context = None
    if nature.tls.has_certificate:
        ends = now - DAY if nature.tls is Tls.EXPIRED else now + 90 * DAY
        context = make(member.host, starts=now - 90 * DAY, ends=ends).server_context()
    receiver = Receiver(
        member.name,
        nature,
        host=member.address,
        port=port,
        tls=context,
        ehlo_names=EHLO_NAMES,
        everybody=everybody,
    )
    await receiver.start()
    return receiver


async def _play(port: int) -> Report:
    everybody = Crowd(Promise(connections=ZONE_CONNECTIONS))
    receivers = [await _listen(each, port, everybody) for each in CAST if each.number != DEAD]
    loop, lag = asyncio.get_running_loop(), 0.0
    end = asyncio.create_task(_end_of_input())
    print("ready", flush=True)
    while not end.done():
        before = loop.time()
        await asyncio.sleep(BEAT)
        lag = max(lag, loop.time() - before - BEAT)
    accounts = [
        Account(each.journal.name, each.here.tally.seen, dict(each.journal.counts), each.journal.errors)
        for each in receivers
    ]
    accounts.append(Account("everybody", everybody.tally.seen, {}, []))
    return Report([arrival for each in receivers for arrival in each.journal.arrivals], accounts, lag)


async def _end_of_input() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    await reader.read()


class Stage:
    """The process. `report` ends it."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def report(self) -> Report:
        assert self._process.stdin is not None
        self._process.stdin.close()
        output, _ = await self._process.communicate()
        assert self._process.returncode == 0, f"the receivers ended with {self._process.returncode}"
        return msgspec.msgpack.decode(output, type=Report)


@contextlib.asynccontextmanager
async def playing(port: int) -> AsyncIterator[Stage]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.support.receivers.play",
        str(port),
        stdin=PIPE,
        stdout=PIPE,
        cwd=REPOSITORY,
    )
    try:
        assert process.stdout is not None
        if await process.stdout.readline() != b"ready\n":
            raise RuntimeError("the receivers did not start")
        yield Stage(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


if __name__ == "__main__":
    report = uvloop.run(_play(int(sys.argv[1])))
    # Unbuffered, as PYTHONUNBUFFERED makes it, standard output may take a part and leave it at that.
    with open(sys.stdout.fileno(), "wb", closefd=False) as output:
        output.write(msgspec.msgpack.encode(report))
