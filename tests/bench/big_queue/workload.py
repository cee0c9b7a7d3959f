"""What LevelDB's sizes cost: an hour of a queue's work, as fast as it goes, beside a standing population.

    python -m tests.bench.big_queue.workload WRITE_BUFFER FILE_SIZE OPEN_FILES [DIRECTORY]     # sizes in MB

60,000 messages of 4 KiB come in, 19 of 20 are delivered at once; 60,000 others wait, come due over the hour's
time, and one of five is delivered then. Every write is synced, as the spool's are. Printed: how long writes
took, octets written to the disk for each that was put, and the size of the spool beside what is alive in it.
"""

from __future__ import annotations

import heapq
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from zonerelay.store.leveldb.engine import plyvel

MB = 1 << 20
HOUR = 3600.0
MESSAGES = STANDING = 60_000
TOGETHER = 20
BODY = 4096
NOW = 1_700_000_000.0
STATE = b'{"created":1700000000.1,"attempts":1,"next_attempt":%.1f,"last":{"reply":"451 4.4.1 no answer"}}'


class Waiting(NamedTuple):
    due: float
    key: bytes


class Workload:
    def __init__(self, db: plyvel.DB) -> None:
        self.db = db
        self.octets = 0
        self.waits: list[float] = []
        self.deferred: list[Waiting] = []
        self._random = random.Random(1)
        self._pool = self._random.randbytes(4 * MB)
        self._ops: list[tuple[bytes, bytes | None]] = []
        self._count = 0

    def populate(self) -> None:
        for _ in range(STANDING // 100):
            for _ in range(100):
                self._defer(self._accept(), NOW + self._random.uniform(0, 4 * HOUR))
            self._commit(sync=False)

    def run(self) -> None:
        fresh: list[bytes] = []
        for number in range(rounds := MESSAGES // TOGETHER):
            now = NOW + HOUR * number / rounds
            for key in fresh:
                if self._random.random() < 0.05:
                    self._defer(key, now + self._random.uniform(60, 4 * HOUR))
                else:
                    self._remove(key)
            fresh = [self._accept() for _ in range(TOGETHER)]
            while self.deferred and self.deferred[0].due <= now:
                waiting = heapq.heappop(self.deferred)
                self._ops.append((_index(waiting), None))
                if self._random.random() < 0.2:
                    self._remove(waiting.key)
                else:
                    self._defer(waiting.key, now + self._random.uniform(600, 4 * HOUR))
            began = time.monotonic()
            self._commit(sync=True)
            self.waits.append(time.monotonic() - began)

    def _accept(self) -> bytes:
        self._count += 1
        key = b"%016x" % (0x19A0000000000000 + self._count)
        at = self._random.randrange(len(self._pool) - BODY)
        self._ops += [
            (b"message %b 000001" % key, self._pool[at : at + BODY]),
            (b"message %b #" % key, b"1700000000.123"),
            (b"message %b *" % key, self._pool[at : at + 200].hex().encode()),
            (b"delivery-zone default %b r@d%d.example" % (key, self._count % 1000), STATE % 0.0),
        ]
        return key

    def _remove(self, key: bytes) -> None:
        parts = (b"message %b 000001", b"message %b #", b"message %b *")
        self._ops += [(part % key, None) for part in parts]
        self._ops.append((_record(key), None))

    def _defer(self, key: bytes, due: float) -> None:
        waiting = Waiting(due, key)
        heapq.heappush(self.deferred, waiting)
        self._ops += [(_record(key), STATE % due), (_index(waiting), b"")]

    def _commit(self, *, sync: bool) -> None:
        batch = self.db.write_batch(sync=sync)
        for key, value in self._ops:
            self.octets += len(key) + len(value or b"")
            if value is None:
                batch.delete(key)
            else:
                batch.put(key, value)
        batch.write()
        self._ops.clear()


def _record(key: bytes) -> bytes:
    return b"delivery-zone default %b r@d%d.example" % (key, (int(key, 16) & 0xFFFFFFFF) % 1000)


def _index(waiting: Waiting) -> bytes:
    return b"deferred-zone default %018.7f %b r@example" % waiting


def written() -> int:
    """Octets that this process has sent towards the disk."""
    return int(Path("/proc/self/io").read_text().partition("\nwrite_bytes: ")[2].split()[0])


def main(write_buffer: int, file_size: int, open_files: int, directory: str | None) -> None:
    with tempfile.TemporaryDirectory(dir=directory) as name:
        db = plyvel.DB(
            name,
            create_if_missing=True,
            write_buffer_size=write_buffer * MB,
            max_file_size=file_size * MB,
            max_open_files=open_files,
            lru_cache_size=4 * MB,
            compression="snappy",
            bloom_filter_bits=10,
        )
        work = Workload(db)
        work.populate()
        before, put, cpu = written(), work.octets, time.process_time()
        work.run()
        waits = sorted(work.waits)
        half, nearly, most = (1e3 * waits[round(part * (len(waits) - 1))] for part in (0.5, 0.99, 1))
        size = sum(file.stat().st_size for file in Path(name).iterdir())
        print(
            f"buffer {write_buffer} MB, files of {file_size} MB, {open_files} open:"
            f" writes p50 {half:.1f}, p99 {nearly:.1f}, longest {most:.0f} ms;"
            f" {(written() - before) / (work.octets - put):.2f} written for each octet put;"
            f" {size / MB:.0f} MB on disk, {(len(work.deferred) + TOGETHER) * 4700 / MB:.0f} alive;"
            f" CPU {time.process_time() - cpu:.1f} s"
        )
        db.close()


if __name__ == "__main__":
    buffer, file, count = map(int, sys.argv[1:4])
    main(buffer, file, count, sys.argv[4] if len(sys.argv) > 4 else None)
