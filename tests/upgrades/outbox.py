"""An outbox in every state: rows of applications, and what a relay has made of some of them."""

import asyncio
import gzip
import tempfile
from pathlib import Path

from tests.support.outbox import OutboxBed, to_sink
from tests.support.sink import Sink
from tests.upgrades.engines import dump_schema, restore_schema

FILE = "outbox.sql.gz"
PORT = 465
"""Of the server in `mailboxes`, which its sealed password belongs to."""


def refuse(verb: str, argument: str) -> str | None:
    """The receiver while the fixture is written."""
    if verb == "RCPT" and "later@" in argument:
        return "451 4.7.1 greylisted"
    return "550 5.1.1 unknown" if verb == "RCPT" and "refused@" in argument else None


async def fill(bed: OutboxBed, sink: Sink) -> None:
    sink.script = refuse
    async with bed.relay(to_sink(sink.port)) as running:
        await bed.until(running, bed.insert(subject="sent"), "sent")
        failed = bed.insert(subject="failed", to_addresses=["refused@example.com"])
        await bed.until(running, failed, "failed")
        bed.insert(subject="partly", to_addresses=["here@example.com", "later@example.com"])
        await running.until_logged("deferred")
        await running.until_logged("delivered", 2)
    bed.insert(
        subject="whole",
        sender="app@example.org",
        cc_addresses=["copy@example.com"],
        bcc_addresses=["blind@example.com"],
        html_body="<p>hello</p>",
        headers={"X-Campaign": "spring"},
    )
    bed.psql(
        """UPDATE outbound_messages SET attachments = '[{"filename": "é.txt", "content": "aGVsbG8="}]'"""
        " WHERE subject = 'whole'"
    )
    bed.insert(subject="through a mailbox", mailbox_id=bed.mailbox(PORT), status="failed")


def dump(bed: OutboxBed) -> bytes:
    return gzip.compress(dump_schema(bed.server.url, bed.schema), mtime=0)


def restore(raw: bytes, bed: OutboxBed) -> None:
    restore_schema(bed.server.url, gzip.decompress(raw), bed.schema)


def write_outbox(target: Path) -> None:
    async def run() -> None:
        with tempfile.TemporaryDirectory() as home:
            bed = OutboxBed(Path(home))
            async with Sink() as sink:
                await fill(bed, sink)
            (target / FILE).write_bytes(dump(bed))
            bed.drop()

    asyncio.run(run())
