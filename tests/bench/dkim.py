"""What DKIM costs by itself: `python -m tests.bench.dkim`.

Three tables from one run: the body hash for kinds of text, a signature for kinds of keys, and whether it is
worth a thread: a loop that has work of its own for every message (as the relay has) signs on the loop or in
one thread beside it. Rounds alternate, the median counts; the machine should have nothing else to do.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence

import uvloop

from tests.support.dkim import NOW, entry, keys_of, sign
from zonerelay.delivery.rewrite.rendering import DkimSigner
from zonerelay.message.dkim.signature import DkimKey, RelaxedBody, author_domain

ROUNDS = 7
PIECE = 4096
OTHER_WORK = 250e-6
"""Seconds of CPU that the relay spends on a small message besides."""
TOGETHER = 20
"""Messages that are under way at a time."""

HEADER = (
    b"Received: from app.example.com (app.example.com [192.0.2.7])\r\n\tby relay.example.com with ESMTPSA\r\n"
    b"\tid 019aa1f2b3c01f00 for <someone@example.net>; Sat, 21 Nov 2026 10:00:00 +0000\r\n"
    b"From: Example <news@example.com>\r\nTo: Someone Else <someone@example.net>\r\n"
    b"Subject: =?utf-8?q?Your_order_has_been_sent?=\r\nDate: Sat, 21 Nov 2026 10:00:00 +0000\r\n"
    b"Message-ID: <20261121100000.1@example.com>\r\nMIME-Version: 1.0\r\n"
    b'Content-Type: multipart/alternative; boundary="=_1234567890"\r\n'
    b"List-Unsubscribe: <https://example.com/u/1234567890>\r\n"
    b"List-Unsubscribe-Post: List-Unsubscribe=One-Click\r\nX-Mailer: app 1.2\r\nX-Campaign: 1234\r\n"
)
HASH = base64.b64encode(bytes(32)).decode()

Job = Callable[[], object]


def bodies() -> dict[str, bytes]:
    line = b"Some words of a line that somebody has written, and a few more to fill it.\r\n"
    cell = b'        <td class="a">words</td>\r\n    <tr>\r\n\t<p>'
    return {
        "text": (line * 60)[:PIECE],
        "HTML, indented": (cell * 100)[:PIECE],
        "base64": base64.encodebytes(os.urandom(PIECE)).replace(b"\n", b"\r\n")[:PIECE],
        "two spaces each word": (b"a  " * PIECE)[:PIECE],
        "blanks at line ends": (b" \r\n" * PIECE)[:PIECE],
    }


def key_sets() -> dict[str, tuple[DkimKey, ...]]:
    def chosen(*files: str) -> tuple[DkimKey, ...]:
        entries = (entry("example.com", f"s{at}", file) for at, file in enumerate(files))
        return keys_of(*entries).for_author("example.com", NOW)

    return {
        "no key": (),
        "ed25519": chosen("ed.pem"),
        "RSA 1024": chosen("weak.pem"),
        "RSA 2048": chosen("rsa.pem"),
        "RSA 2048 and ed25519": chosen("rsa.pem", "ed.pem"),
    }


def rounds(jobs: dict[str, Job], times: int) -> dict[str, float]:
    """Microseconds of CPU for one, the median of the rounds."""
    found: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(ROUNDS):
        for name, job in jobs.items():
            began = time.process_time()
            for _ in range(times):
                job()
            found[name].append((time.process_time() - began) / times * 1e6)
    return {name: statistics.median(each) for name, each in found.items()}


def hash_table() -> Iterable[str]:
    def whole(piece: bytes) -> str:
        body = RelaxedBody()
        body.feed(piece)
        return body.digest()

    made = bodies()
    small = rounds({name: functools.partial(whole, body) for name, body in made.items()}, 2000)
    large = rounds({name: functools.partial(whole, body * 64) for name, body in made.items()}, 50)
    yield f"{'body hash':24} {'µs for 4 KiB':>14} {'MB/s, 256 KiB':>14}"
    for name in made:
        yield f"{name:24} {small[name]:14.1f} {64 * PIECE / large[name]:14.0f}"


def sign_table() -> Iterable[str]:
    jobs: dict[str, Job] = {
        name: functools.partial(sign, HEADER, HASH, keys, now=NOW) for name, keys in key_sets().items()
    }
    jobs["author of the header"] = functools.partial(author_domain, HEADER)
    found = rounds(jobs, 300)
    yield f"{'signature':24} {'µs':>14} {'ed25519 = 1':>14}"
    for name, each in found.items():
        yield f"{name:24} {each:14.1f} {each / found['ed25519']:14.2f}"


def busy() -> Job:
    """Python's own work, for OTHER_WORK."""

    def work(steps: int) -> int:
        return sum(number & 3 for number in range(steps))

    steps = 1000
    while True:
        began = time.process_time()
        for _ in range(20):
            work(steps)
        spent = (time.process_time() - began) / 20
        if spent > OTHER_WORK:
            return functools.partial(work, int(steps * OTHER_WORK / spent))
        steps *= 2


async def loop_round(keys: Sequence[DkimKey], signing: DkimSigner, work: Job) -> tuple[float, float, float]:
    """Wall and CPU per message in µs, and how late the loop was, 99th percentile in ms."""
    loop = asyncio.get_running_loop()
    messages, left, late = 600, 600, []

    async def carry() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            work()
            await signing.sign(HEADER, HASH, keys, now=NOW)
            await asyncio.sleep(0)

    async def watch() -> None:
        while left > 0:
            began = loop.time()
            await asyncio.sleep(0)
            late.append(loop.time() - began)

    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(watch(), *(carry() for _ in range(TOGETHER)))
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    return wall / messages * 1e6, cpu / messages * 1e6, statistics.quantiles(late, n=100)[98] * 1e3


def loop_table() -> Iterable[str]:
    work = busy()
    yield f"{'beside 250 µs of work':24} {'where':>10} {'µs a message':>14} {'CPU':>8} {'turn, p99 ms':>14}"
    signings = {"loop": DkimSigner(threaded=False), "thread": DkimSigner(threaded=True)}
    for name, keys in key_sets().items():
        found: dict[str, list[tuple[float, float, float]]] = {where: [] for where in signings}
        for _ in range(ROUNDS):
            for where, signing in signings.items():
                found[where].append(uvloop.run(loop_round(keys, signing, work)))
        for where, each in found.items():
            wall, cpu, late = (statistics.median(column) for column in zip(*each, strict=True))
            yield f"{name:24} {where:>10} {wall:14.0f} {cpu:8.0f} {late:14.2f}"
    signings["thread"].close()


def main() -> None:
    sys.setswitchinterval(0.0005)  # as the relay does
    for table in (hash_table(), sign_table(), loop_table()):
        for line in table:
            print(line, flush=True)
        print()


if __name__ == "__main__":
    main()
