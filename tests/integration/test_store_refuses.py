"""A store that refuses everything, of every engine: each page, verb and metric still answers, in words.

An operator needs them most at that time. Pages and verbs that need no store answer as always, `status` and
`/metrics` with the last figures that are known, and the rest with one sentence that names the spool.
"""

import asyncio
import json
import os
import re
import smtplib
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.store.spools import s3_settings
from tests.support.ports import free_port
from tests.support.postgres import PostgresServer
from tests.support.redis_server import RedisServer
from tests.support.relay import Running, relay_with, settings
from tests.support.s3_server import SECRET, MotoServer
from zonerelay.config import settings as options
from zonerelay.config.settings import Backend, RedisSettings, Settings, SpoolSettings, ZoneSettings
from zonerelay.control.client import ControlClient
from zonerelay.control.runner import Runner
from zonerelay.control.socket import control_socket_path
from zonerelay.operations import requests
from zonerelay.operations.answers import MetricFamilies, UnreadyReasons
from zonerelay.operations.errors import ControlError
from zonerelay.store.contract import StoreError
from zonerelay.store.leveldb.spool import LevelDb

MESSAGE = b"Subject: one\r\n\r\nbody\r\n"
ENGINES = [each for each in Backend if each is not Backend.MEMORY]
"""What is in memory cannot be refused."""

Break = Callable[[], None]


@pytest.fixture
def engine(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Settings, Break]]:
    """A configuration whose next hop nobody answers, and how its store comes to refuse."""
    backend: Backend = request.param
    spool = SpoolSettings(backend=backend, path=tmp_path / "spool", min_free_space=0)
    chosen = settings(tmp_path, zone=ZoneSettings(next_hop=f"127.0.0.1:{free_port()}"), spool=spool)
    with ExitStack() as stack:
        if backend is Backend.REDIS:
            redis = stack.enter_context(RedisServer(port=free_port()))
            yield replace(chosen, redis=RedisSettings(url=redis.url)), redis.kill
        elif backend is Backend.POSTGRES:
            database = stack.enter_context(PostgresServer())
            schema = f"refuses_{uuid.uuid4().hex[:16]}"
            yield (
                replace(chosen, postgres=options.PostgresSettings(url=database.url, schema=schema)),
                database.kill,
            )
        elif backend is Backend.S3:
            moto = stack.enter_context(MotoServer())
            bucket = s3_settings(moto.url, secret_key=str(secret_file(tmp_path)))
            yield replace(chosen, s3=bucket), lambda: moto.__exit__()
        else:
            yield chosen, lambda: broken_disk(monkeypatch)


def secret_file(directory: Path) -> Path:
    path = directory / "secret"
    path.write_text(SECRET)
    path.chmod(0o600)
    return path


def broken_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device answers every write with an error, for as long as the test lasts."""

    def fails(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    def refuses(*_: object, **__: object) -> None:
        raise StoreError("LevelDB: IO error: Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    monkeypatch.setattr(os, "fdatasync", fails)
    monkeypatch.setattr(LevelDb, "commit", refuses)
    monkeypatch.setattr(LevelDb, "reopen", refuses)


async def refused(running: Running) -> None:
    """Some messages may be taken before the relay knows."""
    for _ in range(100):
        try:
            await running.send("a@example.org", ["two@example.com"], MESSAGE)
        except smtplib.SMTPException as error:
            assert "4.3.0" in str(error)  # noqa: PT017 - the loop ends here
            return
    raise AssertionError("new mail is still taken")


def page(running: Running, path: str) -> tuple[int, str]:
    url = f"http://127.0.0.1:{running.worker.http_port}{path}"
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def sentence(client: ControlClient, request: requests.Request) -> str:
    """How a verb ends: "" when it did what it was asked to."""
    try:
        list(client.stream(request))
    except ControlError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("engine", ENGINES, indirect=True, ids=str)
async def test_every_page_and_verb_answers_while_the_store_refuses(engine: tuple[Settings, Break]) -> None:
    chosen, break_store = engine
    async with relay_with(chosen, trouble_expected=True) as running:
        await running.send("a@example.org", ["one@example.com"], MESSAGE)
        await running.until_logged("deferred")
        (message_id,) = {str(fields["id"]) for fields in running.log.named("accepted")}
        store = running.worker.store
        assert store is not None
        await running.until(store.is_counted, what="the count of the queue")
        await running.status()  # the age of the oldest delivery is known
        break_store()
        await refused(running)

        def of_store() -> list[str]:
            """The history may fail on the same file system, and comes back by itself."""
            return [each for each in running.worker.all_problems() if not each.startswith("history")]

        await running.until(lambda: bool(of_store()), what="a problem")
        reason = of_store()[-1]

        status, metrics = await asyncio.to_thread(page, running, "/metrics")
        assert status == 200
        figures = {
            (sample.name, *sorted(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(metrics)
            for sample in family.samples
        }
        assert figures["zonerelay_store_usable", "0"] == 0
        waiting = [value for name, value in figures.items() if name[0] == "zonerelay_queue_deliveries"]
        # A store that has to count anew says so, and shows no figure rather than one that is too low.
        counting = figures[("zonerelay_queue_counting",)] == 1
        assert (sum(waiting) >= 1) is not counting
        assert counting or figures["zonerelay_queue_oldest_seconds", "default"] > 0
        assert (await asyncio.to_thread(page, running, "/healthz"))[0] == 200
        status, ready = await asyncio.to_thread(page, running, "/readyz")
        assert status == 503
        assert reason in json.loads(ready)["reasons"]

        shown = await running.status()
        assert reason in shown.problems
        assert shown.counted is not counting

        client = ControlClient(control_socket_path(chosen))
        for request in (requests.Ping(), requests.Explain(address="x@example.com")):
            assert await asyncio.to_thread(sentence, client, request) == "", request
        asking = Runner(running.worker.handler, running.worker.events.error)
        assert (await asking.one(requests.PartMetrics(), MetricFamilies, "")).families
        assert reason in (await asking.one(requests.PartReadiness(), UnreadyReasons, "")).reasons
        everything = requests.Filter()
        asked: list[requests.Request] = [
            requests.QueueList(filter=everything),
            requests.QueueCount(filter=everything),
            requests.QueueShow(message_id=message_id),
            requests.QueueTrace(message_id=message_id),
            requests.Resolve(pseudonym="one@example.com"),
            *(
                requests.CHANGES[action](filter=everything, everything=True)
                for action in ("retry", "hold", "release", "bounce", "drop")
            ),
        ]
        for verb in asked:
            async with asyncio.timeout(20):  # no verb waits for the repair
                said = await asyncio.to_thread(sentence, client, verb)
            assert said == "" or said.startswith("the spool: "), verb
            assert "b'" not in said
            assert "Error" not in said


async def test_too_little_space_is_a_problem_with_the_number_that_is_needed(tmp_path: Path) -> None:
    spool = SpoolSettings(path=tmp_path / "spool", min_free_space=1 << 50)
    chosen = settings(tmp_path, zone=ZoneSettings(next_hop=f"127.0.0.1:{free_port()}"), spool=spool)
    async with relay_with(chosen) as running:
        await running.until(lambda: running.worker.store.unhealthy() is not None, what="a look at the disk")
        problems = (await running.status()).problems
    (found,) = (text for text in problems if "new mail is rejected below 1048576.0 GB" in text)
    assert re.fullmatch(r"only [\d.]+ [MG]B are free .*; free [\d.]+ GB more", found)
