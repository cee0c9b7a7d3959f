"""A backup as `zonerelay spool backup` makes it, of the queue of every fixture and of what lies beside it."""

import asyncio
import contextlib
import json
import sqlite3
import tarfile
import zlib
from pathlib import Path

import msgspec

from tests.upgrades import mail
from tests.upgrades.engines import ENGINES, Records
from zonerelay.capture.store import Capture, open_capture
from zonerelay.cli.main import main
from zonerelay.config.credentials import identities
from zonerelay.config.settings import CaptureSettings, Settings, SpoolSettings
from zonerelay.config.user_limits import UserLimits
from zonerelay.history.database import CLEAR, Event, insert, open_for_writing
from zonerelay.inbound.limits.quotas import Quotas
from zonerelay.inbound.limits.usage_file import UsageFile
from zonerelay.queue.operator.journal import Act, DeliverySnapshot, Journal, JournalEntry
from zonerelay.queue.orders.order import HOLD, SUSPEND, Order
from zonerelay.routing.mta_sts import CachedPolicy, StsFiles, StsMode, StsPolicy
from zonerelay.transfer.loader import ImportRegister

FILE = "backup.tar.gz"
TOKEN = identities.Token(
    name="shop", scope="submit", sha256="5e" * 32, created=mail.NOW, expires=4e9, user="app"
)
ACT = Act(id=mail.ACT, at=mail.NOW, verb="hold", who="root", what="sender held@example.org", reason="a look")
ORDERS = [
    Order(
        id="1a2b3c4d",
        effect=SUSPEND,
        reason="a move",
        who="root",
        since=mail.NOW,
        until=mail.NOW + 60,
        zone="other",
        ended=mail.NOW + 60,
    ),
    Order(
        id="2a2b3c4d",
        effect=SUSPEND,
        reason="it is down",
        who="root",
        since=mail.NOW,
        destination="mx.example.com",
        hosts=("mx.example.com:25",),
        stop_clock=True,
    ),
    Order(
        id="3a2b3c4d",
        effect=HOLD,
        reason="it sends spam",
        who="root",
        since=mail.NOW,
        sender="*@held.example",
        user="app",
        refuse=True,
    ),
]
EVENTS: list[Event] = [
    (
        mail.NOW,
        "accepted",
        {"id": "18bcfe5680000100", "sender": "ready@example.org", "to": "one@example.net"},
    ),
    (mail.NOW + 1, "delivered", {"id": "18bcfe5680000100", "recipient": "one@example.net", "code": 250}),
]


CAPTURED = mail.HEAD + b"captured\r\n"
RAILS = UserLimits(messages_per_day=10, recipients_per_day=10, octets_per_day=1000)


def configured(home: Path) -> Path:
    home.mkdir(exist_ok=True)
    path = home / "zonerelay.toml"
    path.write_text(f'[spool]\npath = "{home}/spool"\nmin_free_space = 0\n')
    return path


def make(home: Path) -> Path:
    """Returns the directory of the backup."""
    engine = ENGINES["leveldb"]
    config = configured(home)
    asyncio.run(engine.write(engine.spool(home)))
    (home / "redact.key").write_bytes(b"k" * 32)
    policy = StsPolicy(StsMode.ENFORCE, ("mx.example.com", "*.example.net"), 604800)
    StsFiles(home / "mta-sts").save(CachedPolicy.of("example.com", "20260101", policy, mail.NOW))
    ImportRegister(home).add([("a key", "recipient@example.net")])
    identities.add(home / "identities.json", TOKEN)
    (home / "orders").mkdir(mode=0o700)
    (home / "orders" / "orders.json").write_bytes(msgspec.json.encode(ORDERS))
    asyncio.run(_hold(home / "acts" / "00"))
    _tell(home / "history" / "00.db")
    captured(home).add("18bcfe5680000100", "app@example.org", ["one@example.net"], CAPTURED)
    asyncio.run(_use(home))
    target = home / "backup"
    assert main(["spool", "backup", str(target), "--config", str(config)]) == 0
    return target


def captured(home: Path) -> Capture:
    settings = Settings(
        spool=SpoolSettings(path=home / "spool", min_free_space=0), capture=CaptureSettings(keep=1e10)
    )
    return open_capture(settings, lambda: mail.NOW)


def quotas(home: Path) -> Quotas:
    return Quotas(lambda: UsageFile(home, mail.clock()), mail.clock(), lambda _user, _level: None)


async def _use(home: Path) -> None:
    counted = quotas(home)
    assert isinstance(await counted.take("shop", RAILS, (1, 2, 300)), float)
    await counted.close()


def held() -> JournalEntry:
    """What the act has noted."""
    (delivery,) = mail.queue()[2].deliveries
    before = DeliverySnapshot.of(delivery)
    return JournalEntry(delivery.key, before, before._replace(held=True, act=ACT.id))


async def _hold(directory: Path) -> None:
    journal = Journal(directory, mail.clock())
    await journal.begin(ACT)
    assert await journal.note(ACT.id, [held()])
    await journal.finish(msgspec.structs.replace(ACT, matched=1, changed=1))


def _tell(file: Path) -> None:
    with contextlib.closing(open_for_writing(file)) as database:
        insert(database, 1, EVENTS)
        database.execute("INSERT INTO run VALUES (?, ?, 1, ?)", (mail.NOW, mail.NOW + 1, CLEAR))
        database.execute("INSERT INTO gap VALUES (?, ?, ?)", (mail.NOW - 9, mail.NOW, "the relay was off"))


def records(backup: Path) -> Records:
    """Every file and every member of the tar, without what differs from one backup to the next."""
    found = {}
    for path in backup.rglob("*"):
        name = str(path.relative_to(backup))
        if path.suffix == ".tar":
            with tarfile.open(path) as tar:
                for member in tar:
                    file = tar.extractfile(member)
                    found[f"{name} {member.name}"] = "" if file is None else _still(member.name, file.read())
        elif path.suffix == ".db":
            # The octets of the file depend on the release of SQLite.
            with contextlib.closing(sqlite3.connect(path)) as database:
                found[name] = "\n".join(database.iterdump())
        elif path.is_file():
            found[name] = _still(name, path.read_bytes())
    return found


def _still(name: str, raw: bytes) -> str:
    if name.endswith(".log"):
        # A length and a checksum, and what the release of zlib makes of the rest.
        return zlib.decompress(raw[8:]).decode("latin-1")
    if not name.endswith(".json"):
        return raw.decode("latin-1")
    document = json.loads(raw)  # blanks between its members are not part of the format
    if not name.startswith("home/"):
        for member in ("zonerelay", "made", "hostname"):
            document.pop(member, None)
        if isinstance(document.get("files"), dict):
            document["files"] = sorted(document["files"])
    return json.dumps(document)
