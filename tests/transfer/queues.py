"""What the tests of other systems' queues share: a next hop that keeps some mail waiting, and an import."""

import smtplib
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.store.builders import body_of
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message
from zonerelay.routing.zones.zones import Zones
from zonerelay.store.contract import Store
from zonerelay.transfer.files import UnusableMessage
from zonerelay.transfer.loader import ImportRegister, ImportResult, Loader
from zonerelay.transfer.others import reading

BUSY = "450 4.2.1 <x> mailbox busy"


class _Hop(socketserver.StreamRequestHandler):
    """Takes mail for recipients whose names begin with "good", and defers the others."""

    def handle(self) -> None:
        self._say("220 hop.test")
        while line := self.rfile.readline():
            command = line.decode().upper().strip()
            if command.startswith("EHLO"):
                self._say("250-hop.test\r\n250 8BITMIME")
            elif command.startswith("RCPT"):
                self._say("250 ok" if "<GOOD" in command else BUSY)
            elif command.startswith("DATA"):
                self._say("354 go on")
                while self.rfile.readline() != b".\r\n":
                    pass
                self._say("250 ok")
            elif command.startswith("QUIT"):
                self._say("221 bye")
                return
            else:
                self._say("250 ok")

    def _say(self, text: str) -> None:
        self.wfile.write(f"{text}\r\n".encode())
        self.wfile.flush()


@contextmanager
def hop() -> Iterator[int]:
    """The port of a next hop."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Hop) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def submit(port: int, body: bytes) -> None:
    """A message with every wish for three recipients, of whom the hop takes the first."""
    with smtplib.SMTP("127.0.0.1", port) as client:
        client.ehlo("client.example.org")
        client.docmd("MAIL FROM:<a@example.org> RET=HDRS ENVID=QQ+2B1 BODY=8BITMIME")
        client.docmd("RCPT TO:<good@Example.NET> NOTIFY=NEVER")
        client.docmd("RCPT TO:<bad@example.net> NOTIFY=SUCCESS,FAILURE ORCPT=rfc822;orig+2Bx@example.net")
        client.docmd("RCPT TO:<bad2@example.net>")
        assert client.data(body)[0] == 250


async def import_into(store: Store, home: Path, system: str, place: str) -> ImportResult:
    """As the command does it."""
    register = ImportRegister(home)
    now = time.time()
    faults: list[UnusableMessage] = []

    def saw(trouble: UnusableMessage | None) -> None:
        faults.extend([trouble] if trouble else [])

    loader = Loader(store, register, Zones(()), now=now, saw=saw)
    async with reading(system, place, now) as source:
        await loader.load(source)
    assert len(faults) == loader.loaded.unusable
    return loader.loaded


async def rows(store: Store) -> list[tuple[Message, list[Delivery], bytes]]:
    """Each message with its deliveries and body."""
    ids = sorted({each.message_id async for each in store.scan()})
    return [
        (await store.read_message(each), await store.deliveries_of(each), await body_of(store, each))
        for each in ids
    ]
