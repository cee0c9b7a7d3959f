"""OpenStack Swift's S3 API, a second service with real servers: the essentials of the contract.

One relay alone uses it: its If-None-Match is no promise of all copies together.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from tests.store import builders
from tests.store import test_contract as contract
from tests.store.spools import Spool, s3_settings
from tests.support.swift import KEY, SECRET, swift_server
from zonerelay.config.settings import Addressing, Backend, S3Settings
from zonerelay.model.clock import SystemClock
from zonerelay.store.contract import Store
from zonerelay.store.objects.s3 import Bucket

pytestmark = pytest.mark.proof


@pytest.fixture(scope="module")
def swift() -> Iterator[str]:
    with swift_server() as url:
        asyncio.run(_make_bucket(url))
        yield url


async def _make_bucket(url: str) -> None:
    place = S3Settings(region="us-east-1", addressing=Addressing.PATH, access_key=KEY)
    bucket = Bucket(place, lambda: SECRET)
    bucket._secret_key = SECRET  # which `open` would read
    async with bucket._make("s3", url) as client:
        await client.create_bucket(Bucket="mail-queue")


def settings(url: str, tmp_path: Path) -> S3Settings:
    secret = tmp_path / "secret"
    if not secret.exists():  # others may be reading it
        secret.write_text(SECRET)
    return s3_settings(url, access_key=KEY, secret_key=str(secret), shared=False, lease=60.0, timeout=30.0)


def spool_on(url: str, tmp_path: Path) -> Spool:
    return Spool(tmp_path, backend=Backend.S3, s3=settings(url, tmp_path), clock=SystemClock())


@pytest.fixture
async def spool(swift: str, tmp_path: Path) -> AsyncIterator[Spool]:
    async with spool_on(swift, tmp_path) as opened:
        yield opened


ESSENTIALS = (
    contract.TestTakingMail().test_committed_message_reads_back_whole,
    contract.TestTakingMail().test_message_that_is_cut_off_by_an_error_is_aborted,
    contract.TestDeferring().test_deferred_delivery_is_claimed_when_due_and_not_before,
    contract.TestSettling().test_last_delivery_takes_the_message_with_it,
    contract.TestSettling().test_recipients_of_one_message_settle_at_once_from_several_sides,
    contract.TestSettling().test_outcome_and_bounce_appear_together,
    contract.TestSettling().test_settling_what_an_operator_dropped_is_ignored,
    contract.TestOperations().test_update_moves_a_delivery_to_another_queue,
    contract.TestClosing().test_closed_store_answers_with_store_errors_only,
)


async def test_essentials_of_the_contract_hold(swift: str, tmp_path: Path) -> None:
    async def hold(essential: Callable[[Store], Awaitable[None]]) -> None:
        async with spool_on(swift, tmp_path) as opened:
            await essential(opened.store)

    await asyncio.gather(*map(hold, ESSENTIALS))


async def test_large_bodies_come_back_whole_and_a_restart_finds_everything(spool: Spool) -> None:
    body = bytes(range(256)) * (24 * 1024)
    envelope = builders.envelope_for(builders.message_id(1), "a@example.net")
    async with spool.store.begin(envelope) as writer:
        for start in range(0, len(body), 500_000):
            await writer.write(body[start : start + 500_000])
        await writer.commit([builders.delivery_for(envelope, "a@example.net")])
    await builders.store_message(spool.store, 2, next_attempt=builders.NOW - 5)
    await spool.reopen()
    assert await builders.claim_ids(spool.store) == [1, 2]
    assert await builders.body_of(spool.store, builders.message_id(1)) == body
