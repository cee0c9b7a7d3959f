"""Keys that change while the relay runs: by a reload, by a reload that is refused, and by date."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tests.support.dkim import PEMS, entry, records, verified
from tests.support.relay import LOOPBACK, Running, relay_with, settings
from tests.support.sink import Sink
from zonerelay.config.settings import DkimSettings, ZoneSettings

MESSAGE = b"From: ann@example.com\r\nSubject: hello\r\n\r\nOne line.\r\n"


def on_disk(directory: Path, *entries: DkimSettings) -> tuple[DkimSettings, ...]:
    for each in entries:
        (directory / each.key_file).write_bytes(PEMS[each.key_file.name]())
    return tuple(replace(each, key_file=directory / each.key_file) for each in entries)


@dataclass(slots=True)
class Stage:
    running: Running
    sink: Sink
    published: dict[str, str]
    sent: int = 0

    async def selectors(self) -> list[str]:
        """Of the signatures of a message that is sent now; they all hold."""
        self.sent += 1
        await self.running.send("ann@example.com", ["bob@example.net"], MESSAGE)
        message = (await self.sink.wait_for(self.sent))[-1].body
        found = [each.decode() for each in re.findall(rb" s=([a-z0-9]+);", message)]
        assert verified(message, self.published) == [True] * len(found)
        return found


@asynccontextmanager
async def staged(directory: Path, *entries: DkimSettings) -> AsyncIterator[Stage]:
    async with Sink() as sink:
        chosen = settings(directory, zone=ZoneSettings(next_hop=f"{LOOPBACK}:{sink.port}"))
        async with relay_with(replace(chosen, dkim=on_disk(directory, *entries))) as running:
            yield Stage(running, sink, records((OLD, NEW, ED)))


OLD, NEW, ED = (
    entry("example.com", "old"),
    entry("example.com", "new", "rsa2.pem"),
    entry("example.com", "ed", "ed.pem"),
)


async def test_a_reload_brings_new_keys_and_a_bad_one_leaves_the_old_ones(tmp_path: Path) -> None:
    async with staged(tmp_path, OLD) as stage:
        assert await stage.selectors() == ["old"]

        chosen = stage.running.worker.settings
        await stage.running.worker.reload(replace(chosen, dkim=on_disk(tmp_path, NEW, ED)))
        assert await stage.selectors() == ["new", "ed"]

        bad = on_disk(tmp_path, OLD)
        bad[0].key_file.write_text("no key")
        await stage.running.worker.reload(replace(chosen, dkim=bad))
        (refused,) = stage.running.log.named("reload-refused")
        assert str(refused["first"]).startswith("dkim[0].key_file: ")
        assert "is not a private key in PEM" in stage.running.worker.problems[0]
        assert await stage.selectors() == ["new", "ed"]

        await stage.running.worker.reload(replace(chosen, dkim=()))
        assert stage.running.worker.problems == ()
        assert await stage.selectors() == []


async def test_a_key_whose_time_comes_signs_from_then_on_without_a_reload(tmp_path: Path) -> None:
    """The clock is the machine's here; the very second is in the unit tests."""
    async with staged(tmp_path, OLD) as stage:
        assert await stage.selectors() == ["old"]
        change = time.time() + 0.3
        entries = on_disk(tmp_path, replace(OLD, not_after=change), replace(NEW, not_before=change))
        await stage.running.worker.reload(replace(stage.running.worker.settings, dkim=entries))
        await stage.running.until(lambda: time.time() > change, what="the change")
        assert await stage.selectors() == ["new"]


async def test_keys_that_end_soon_are_spoken_of_at_the_start(tmp_path: Path) -> None:
    ending = replace(OLD, not_after=time.time() + 86_400)
    async with staged(tmp_path, ending) as stage:
        (advice,) = stage.running.log.named("advice")
        assert str(advice["note"]).startswith("dkim[0].not_after: this key ends on")
