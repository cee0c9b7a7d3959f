"""`python -m tests.bench.growth`: what a message, a start and a reload cost with large configurations.

Each set-up is a relay of its own that differs from the small one in one kind of table, the last of which its
mail meets. Mail of 4 KiB comes in one kept session and leaves to a sink. CPU is that of the relay, for each
message, and the ratio that to the small set-up in the same round. The reload takes up another number of
connections of one zone; `pause` is the longest pause of the event loop meanwhile, `own` the most CPU that the
loop's own thread used in one (`big_queue/loop_watch.py`).

`--only history,users` measures what grows with the events of a history and with the users, without a relay:
seconds of CPU of searches, and of what a change of one user costs a command and the relay.
"""

import argparse
import base64
import contextlib
import random
import signal
import smtplib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from tests.bench.big_queue.loop_watch import Seen
from tests.support.debian import REPOSITORY
from tests.support.meters import read_memory
from tests.support.ports import LOOPBACK, free_port
from tests.support.process import RelayProcess
from tests.support.sink import Sink
from tests.support.toml import Table
from zonerelay.config import user_limits
from zonerelay.config.credentials import file as credentials
from zonerelay.config.credentials import passwords
from zonerelay.history import database as files
from zonerelay.history.reader import Histories, Query
from zonerelay.message.dkim.keys import new_private_key
from zonerelay.telemetry.logs.redact import SearchForms

MIB = 1024 * 1024
SEVERAL, MANY, VERY_MANY = 100, 10_000, 100_000
WARM_UP = 100
BODY = b"From: <a@example.org>\r\nTo: <b@example.net>\r\nSubject: growth\r\n\r\n" + b"x" * 70 + b"\r\n" * 2
MESSAGE = BODY + (b"0123456789" * 7 + b"\r\n") * 56
START_TIMEOUT = 300.0
RECIPIENT = "zoe@last.example"

FORTNIGHT = 14 * 86_400.0
BIG = "big@example.org"
ATTEMPT: dict[str, files.Field] = {
    "zone": "default",
    "host": "mx.example.com",
    "attempt": 1,
    "reply": "250 2.0.0 Ok: queued as 4ABCDEF",
}
SEARCHES = {
    "the newest 100 of a large sender": Query(sender=SearchForms(frozenset({BIG}))),
    "its newest 100 that bounced": Query(sender=SearchForms(frozenset({BIG})), outcome="bounced"),
    "one recipient": Query(recipient=SearchForms(frozenset({"u77@example.com"}))),
    "a text that no reply has": Query(reply="no such reply"),
}

Tables = Mapping[str, Table | Sequence[Table]]


@dataclass(frozen=True, slots=True)
class SetUp:
    """`tables` takes the number of entries, the zone's next hop and a directory for files."""

    name: str
    entries: int
    tables: Callable[[int, str, Path], Tables]
    listener: Callable[[int], Table] = lambda entries: {}


def small(entries: int, hop: str, directory: Path) -> Tables:
    return {}


def destinations(entries: int, hop: str, directory: Path) -> Tables:
    found: list[Table] = [
        {"mx": [f"mx{number}.example"], "max_connections": 5} for number in range(entries - 1)
    ]
    return {"destination": [*found, {"mx": [f"[{LOOPBACK}]"], "max_connections": 10}]}


def access(entries: int, hop: str, directory: Path) -> Tables:
    return {
        "access": [
            *(
                {"action": "refuse", "sender": [f"bad@customer{number}.example"]}
                for number in range(entries - 1)
            ),
            {"action": "accept", "recipient": [RECIPIENT]},
        ]
    }


def routes(entries: int, hop: str, directory: Path) -> Tables:
    return {
        "route": [
            *(
                {"recipient_domain": [f"customer{number}.example"], "zone": "default"}
                for number in range(entries - 1)
            ),
            {"recipient_domain": ["last.example"], "zone": "default"},
        ]
    }


def zones(entries: int, hop: str, directory: Path) -> Tables:
    names = ["default", *(f"zone{number}" for number in range(1, entries))]
    return {
        "zone": [{"name": name, "tls": "none", "next_hop": hop} for name in names],
        "route": [{"recipient_domain": ["last.example"], "zone": names[-1]}],
    }


def rewrites(entries: int, hop: str, directory: Path) -> Tables:
    return {
        "rewrite": [
            {"address": [f"old@customer{number}.example"], "to": "*@new.example"} for number in range(entries)
        ]
    }


def keys(entries: int, hop: str, directory: Path) -> Tables:
    pem = new_private_key("rsa-sha256")
    found: list[Table] = []
    for number in range(entries):
        file = directory / f"{number}.key"
        file.write_text(pem)
        file.chmod(0o600)
        domain = "example.org" if number == entries - 1 else f"customer{number}.example"
        found.append({"domain": domain, "selector": "growth", "key_file": str(file)})
    return {"dkim": found}


def webhooks(entries: int, hop: str, directory: Path) -> Tables:
    """Nothing listens at their endpoints, and they want every event."""
    secret = directory / "webhook.secret"
    secret.write_text("whsec_" + base64.b64encode(bytes(32)).decode())
    secret.chmod(0o600)
    url = f"http://{LOOPBACK}:{free_port()}/hook"
    return {
        "webhook": [
            {"name": f"hook{number}", "url": url, "secret": str(secret), "private": True}
            for number in range(entries)
        ]
    }


def networks(entries: int) -> Table:
    of = (f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}" for number in range(entries))
    return {"allow_networks": [*of, "127.0.0.0/8"]}


SET_UPS = (
    SetUp("small", 1, small),
    SetUp("destinations", MANY, destinations),
    SetUp("access", MANY, access),
    SetUp("routes", MANY, routes),
    SetUp("zones", MANY, zones),
    SetUp("rewrites", VERY_MANY, rewrites),
    SetUp("networks", VERY_MANY, small, networks),
    SetUp("webhooks", SEVERAL, webhooks),
    SetUp("dkim", MANY, keys),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.growth", description=__doc__)
    parser.add_argument("--only", default="", metavar="A,B", help="only these set-ups, beside the small one")
    parser.add_argument("--messages", type=int, default=400, help="in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="entries times this")
    options = parser.parse_args()
    only = [*filter(None, options.only.split(","))]
    for name, table in (("history", history), ("users", users)):
        if not only or name in only:
            table(options.scale)
    if only and not set(only) - {"history", "users"}:
        return 0
    print("| set-up | entries | start s | memory MiB | ms of CPU | ratio | pause at reload ms | own ms |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="zonerelay-growth-", dir="/var/tmp") as name:
        directory = Path(name)
        with (
            Sink(keep_bodies=False) as sink,
            running(SET_UPS[0], 1, sink.port, directory / "small") as (base, _),
        ):
            show(SET_UPS[0], base, base, options)
            for each in SET_UPS[1:]:
                if not only or each.name in only:
                    entries = max(1, int(each.entries * options.scale))
                    with running(each, entries, sink.port, directory / each.name) as (relay, took):
                        show(each, relay, base, options, entries, took)
    return 0


def history(scale: float) -> None:
    """Two million events of a fortnight: a fifth of the mail is of one sender, one in a thousand bounces."""
    count, draw = int(1_000_000 * scale), random.Random(1)
    step, began = FORTNIGHT / count, time.time() - FORTNIGHT
    events: list[files.Event] = []
    with tempfile.TemporaryDirectory(prefix="zonerelay-growth-", dir="/var/tmp") as name:
        database, row = files.open_for_writing(Path(name) / "history" / "00.db"), 1
        for number in range(count):
            at = began + number * step
            message_id = f"{int(at * 1000):011x}{number & 0xFFFFF:05x}"
            sender = BIG if number % 5 == 0 else f"s{draw.randrange(5000)}@example.org"
            to = f"u{draw.randrange(200_000)}@example.com"
            outcome = "bounced" if number % 997 == 0 else "delivered"
            accepted: files.Event = (at, "accepted", {"id": message_id, "sender": sender, "to": to})
            attempt: files.Event = (at + 0.5, outcome, {"id": message_id, "recipient": to, **ATTEMPT})
            events += (accepted, attempt)
            if len(events) >= files.BLOCK * 512 or number == count - 1:
                with database:
                    database.execute("BEGIN IMMEDIATE")
                    row = files.insert(database, row, events)
                events = []
        database.close()
        for what, query in SEARCHES.items():
            with Histories(Path(name) / "history", None) as histories:
                print_cost(f"history of {2 * count:,} events: {what}", partial(histories.find, query, 100))


def users(scale: float) -> None:
    count = int(VERY_MANY * scale)
    hashed = passwords.nobodys_hash(())
    with tempfile.TemporaryDirectory(prefix="zonerelay-growth-", dir="/var/tmp") as name:
        path = Path(name) / "credentials"
        path.write_text("".join(f"user{each}@example.com:{hashed}\n" for each in range(count)))
        limits = user_limits.file_beside(path)
        limits.write_text(
            "".join(f'[user."user{each}@example.com"]\nmessages_per_hour = 100\n\n' for each in range(count))
        )
        one = f"user{count // 2}@example.com"
        of = f"{count:,} users with limits"
        print_cost(
            f"{of}: `user set`",
            lambda: user_limits.change_user(
                path,
                one,
                lambda _, there: (credentials.User(one, hashed), user_limits.changed(there, ["zones=bulk"])),
            ),
        )
        print_cost(f"{of}: users are read again", lambda: credentials.read(path, whole=True))
        print_cost(f"{of}: limits are read again", lambda: user_limits.read(limits, whole=True).of(one))


def print_cost(what: str, act: Callable[[], object]) -> None:
    began = time.process_time()
    act()
    print(f"{what}: {time.process_time() - began:.2f} s of CPU", flush=True)


@contextlib.contextmanager
def running(set_up: SetUp, entries: int, port: int, directory: Path) -> Iterator[tuple[RelayProcess, float]]:
    """The relay, and the seconds that it took to start."""
    directory.mkdir()
    hop = f"{LOOPBACK}:{port}"
    relay = RelayProcess(
        directory / "relay",
        next_hop=hop,
        listener=set_up.listener(entries),
        tables=set_up.tables(entries, hop, directory),
        launcher=[sys.executable, "-m", "tests.bench.big_queue.watched", str(directory / "pauses")],
        environment={"PYTHONPATH": str(REPOSITORY)},
    )
    began = time.monotonic()
    try:
        relay.start(timeout=START_TIMEOUT)
        yield relay, time.monotonic() - began
    finally:
        relay.kill()


def show(
    set_up: SetUp,
    relay: RelayProcess,
    base: RelayProcess,
    options: argparse.Namespace,
    entries: int = 1,
    took: float = 0.0,
) -> None:
    for each in (base, relay):
        measured(each, WARM_UP)
    rounds = [
        (measured(base, options.messages), measured(relay, options.messages)) for _ in range(options.rounds)
    ]
    cpu, ratio = (
        statistics.median(own for _, own in rounds),
        statistics.median(own / other for other, own in rounds),
    )
    memory = read_memory([relay.pid]).pss / MIB
    pause, own = reloaded(relay)
    print(
        f"| {set_up.name} | {entries} | {took:.1f} | {memory:.0f} | {cpu * 1e3:.2f} | {ratio:.2f}"
        f" | {pause * 1e3:.0f} | {own * 1e3:.0f} |",
        flush=True,
    )


def measured(relay: RelayProcess, messages: int) -> float:
    """Seconds of CPU of the relay for each message, until the last has been delivered."""
    before, done = cpu_seconds(relay.pid), len(relay.events("delivered"))
    with smtplib.SMTP(LOOPBACK, relay.smtp_port, timeout=60) as client:
        for _ in range(messages):
            assert not client.sendmail("a@example.org", [RECIPIENT], MESSAGE)
    relay.wait_for(lambda: len(relay.events("delivered")) >= done + messages, what="delivered")
    return (cpu_seconds(relay.pid) - before) / messages


def reloaded(relay: RelayProcess) -> tuple[float, float]:
    """The longest pause of the event loop while another number of connections is taken up: all of it, and the
    CPU of its thread.
    """
    relay.config.write_text(relay.config.read_text().replace("[[zone]]", "[[zone]]\nmax_connections = 17", 1))
    done, began = len(relay.events("reloaded")), time.monotonic()
    relay.signal(signal.SIGHUP)
    relay.wait_for(lambda: len(relay.events("reloaded")) > done, what="reloaded", timeout=START_TIMEOUT)
    time.sleep(1)  # it writes what it has seen after a while
    file = relay.directory.parent / "pauses"
    lines = file.read_bytes().splitlines() if file.exists() else []
    seen = [msgspec.json.decode(line, type=Seen).pause for line in lines]
    pauses = [each for each in seen if each is not None and each.ended > began]
    if not pauses:
        return 0.0, 0.0
    worst = max(pauses, key=lambda each: each.wall)
    for stack, count in sorted(worst.stacks.items(), key=lambda each: -each[1])[:3]:
        print(f"    {count} × {stack}", file=sys.stderr)
    return worst.wall, max(each.cpu for each in pauses)


def cpu_seconds(pid: int) -> float:
    """Of all threads, to the nanosecond: the ticks of `stat` are too coarse for next to nothing."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


if __name__ == "__main__":
    sys.exit(main())
