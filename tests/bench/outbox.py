"""How fast an outbox is: rows a second, from commit to sent, CPU of relay and database for each.

    python -m tests.bench.outbox [ROWS]

Relay, PostgreSQL and sink are processes of this machine; rows have 4 KiB of text, one recipient each.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.support.meters import read_stat
from tests.support.postgres import PostgresServer
from tests.support.process import RelayProcess
from tests.support.sink import Sink
from tests.support.toml import Table

TABLE = "public.outbound_messages"
ONE_BY_ONE = 100
TICKS = os.sysconf("SC_CLK_TCK")


def insert(server: PostgresServer, count: int) -> None:
    server.psql(
        f"INSERT INTO {TABLE} (from_address, to_addresses, subject, text_body)"
        " SELECT 'app@example.org', ARRAY['user' || i || '@example.com'], 'row ' || i,"
        " repeat('four octets. ', 315)"
        f" FROM generate_series(1, {count}) i"
    )


def cpu_of(server: PostgresServer) -> float:
    """Of the server with the connections that have ended, and those that are open."""
    pids = [int(pid) for pid in server.psql("SELECT pid FROM pg_stat_activity").split()]
    stats = [read_stat(pid) for pid in {server.pid, *pids}]
    return sum(sum(stat.ticks) for stat in stats if stat) / TICKS


async def until_sent(server: PostgresServer) -> None:
    statement = f"SELECT count(*) FROM {TABLE} WHERE status <> 'sent'"
    while await asyncio.to_thread(server.psql, statement) != "0":
        await asyncio.sleep(0.2)


async def run(rows: int) -> None:
    sink = Sink(keep_bodies=False)
    await sink.start()
    with PostgresServer() as server, tempfile.TemporaryDirectory() as directory:
        tables: dict[str, Table] = {"outbox": {"url": server.url, "create_tables": True}}
        with RelayProcess(Path(directory), next_hop=f"127.0.0.1:{sink.port}", tables=tables) as relay:
            for _ in range(ONE_BY_ONE):
                await asyncio.to_thread(insert, server, 1)
            await until_sent(server)
            times = server.psql(
                "SELECT percentile_cont(ARRAY[0.5, 0.99]) WITHIN GROUP"
                f" (ORDER BY extract(epoch FROM sent_at - created_at) * 1000) FROM {TABLE}"
            )
            print(f"one at a time: from insert to sent p50, p99 in ms: {times}")
            cpu, database, began = relay.cpu_seconds(), cpu_of(server), time.monotonic()
            await asyncio.to_thread(insert, server, rows)
            await until_sent(server)
            seconds = time.monotonic() - began
            cpu, database = relay.cpu_seconds() - cpu, cpu_of(server) - database
            print(
                f"{rows} at once: {rows / seconds:.0f} rows/s, CPU of the relay {1000 * cpu / rows:.2f} ms,"
                f" of the database {1000 * database / rows:.2f} ms a row"
            )
    await sink.close()


if __name__ == "__main__":
    asyncio.run(run(int(sys.argv[1]) if len(sys.argv) > 1 else 5000))
