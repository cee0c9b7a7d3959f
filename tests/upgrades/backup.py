"""A backup as `zonerelay spool backup` makes it, of the queue of every fixture and of what lies beside it."""

from __future__ import annotations

import asyncio
import json
import tarfile
from pathlib import Path

from tests.upgrades import mail
from tests.upgrades.engines import ENGINES, Records
from zonerelay.cli.main import main
from zonerelay.routing.mta_sts.files import StsFiles
from zonerelay.routing.mta_sts.policy_text import HeldPolicy, StsMode, StsPolicy
from zonerelay.transfer.register import Register

FILE = "backup.tar.gz"


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
    StsFiles(home / "mta-sts").save(HeldPolicy("example.com", "20260101", policy, mail.NOW))
    register = Register(home)
    register.add([("a key", "recipient@example.net")])
    register.close()
    target = home / "backup"
    assert main(["spool", "backup", str(target), "--config", str(config)]) == 0
    return target


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
        elif path.is_file():
            found[name] = _still(name, path.read_bytes())
    return found


def _still(name: str, raw: bytes) -> str:
    if not name.endswith(".json"):
        return raw.decode("latin-1")
    sheet = json.loads(raw)
    for member in ("zonerelay", "made", "hostname"):
        sheet.pop(member, None)
    if isinstance(sheet.get("files"), dict):
        sheet["files"] = sorted(sheet["files"])
    return json.dumps(sheet)
