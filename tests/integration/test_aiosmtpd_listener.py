"""docs/examples/aiosmtpd_listener.py: a Controller of aiosmtpd that streams through `submit`."""

from __future__ import annotations

import asyncio
import runpy
import smtplib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.inbound import House, listening
from tests.support.ports import free_port
from zonerelay.config.settings import ListenerSettings
from zonerelay.control.socket import bind
from zonerelay.inbound.listen.submit_socket import SubmitClient, SubmitSocket

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "docs/examples/aiosmtpd_listener.py"))
LARGE = b"Subject: x\r\n\r\n.dot\r\n" + (b"x" * 70 + b"\r\n") * 30_000


class Served:
    def __init__(self, house: House, port: int) -> None:
        self.house = house
        self._port = port

    async def send(self, body: bytes, *recipients: str) -> Any:  # Any: smtplib's
        """Return the reply to DATA, or those of the recipients that it stands for."""

        def send() -> Any:
            with smtplib.SMTP("127.0.0.1", self._port, timeout=30) as client:
                client.ehlo("client.test")
                client.mail("a@example.org", ["BODY=8BITMIME"])
                for each in recipients:
                    assert client.rcpt(each)[0] == 250
                try:
                    return client.data(body)
                except smtplib.SMTPDataError as error:
                    return error.smtp_code, error.smtp_error
                finally:
                    assert client.noop()[0] == 250

        return await asyncio.to_thread(send)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    settings = ListenerSettings(address="127.0.0.1:0", max_message_size=4 * 1024**2, max_recipients=2)
    async with listening(settings) as house:
        path = tmp_path / "submit.sock"
        server = SubmitSocket(house.listener.submissions.submit)
        await server.start(bind(path))
        submit = SubmitClient(lambda: [path]).submit
        controller = EXAMPLE["ListenerController"](submit, hostname="127.0.0.1", port=free_port())
        await asyncio.to_thread(controller.start)
        yield Served(house, controller.port)
        await asyncio.to_thread(controller.stop)
        server.close()
        await server.drain()


async def test_a_message_streams_and_is_acknowledged_after_the_commit(served: Served) -> None:
    committing, go_on = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        committing.set()
        await go_on.wait()

    served.house.store.before_commit = wait
    sending = asyncio.ensure_future(served.send(LARGE, "zoe@example.net"))
    await committing.wait()
    assert not sending.done()
    go_on.set()
    code, text = await sending
    (stored,) = served.house.store.stored
    assert (code, text.decode()) == (250, f"2.0.0 OK queued as {stored.message.envelope.id}")
    assert stored.body.endswith(LARGE)
    assert stored.message.envelope.origin.helo == "client.test"


async def test_refusals_are_those_of_the_relay(served: Served) -> None:
    code, text = await served.send(LARGE * 2, "zoe@example.net")
    assert (code, text) == (552, b"5.3.4 Message exceeds 4 MB, the limit of this listener")
    code, text = await served.send(b"x", "a@example.net", "b@example.net", "c@example.net")
    assert (code, text[:6]) == (452, b"4.5.3 ")
    assert not served.house.store.stored
