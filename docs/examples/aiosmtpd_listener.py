"""aiosmtpd as a listener of zonerelay: its server streams each message through `submit`.

    python docs/examples/aiosmtpd_listener.py 127.0.0.1 2526 /var/lib/zonerelay/http-00.sock

listens there and submits to a worker on its socket, which is next to the control socket of a relay with
several workers and an address in [admin].

aiosmtpd speaks SMTP, and `submit` does all the rest. The body goes on in pieces of 64 KiB and is never whole
in memory; 250 is answered after the synced commit; every check of the relay's first [[listener]] holds for
this mail, too: access by the client's address, limits, the policy, suspensions, idempotency.

What the relay's own session does and this one does not: it answers a refused sender or recipient where it is
named, not where DATA is; it offers DSN, CHUNKING and PIPELINING. `docs/develop/flow.md` compares the cost.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP

from zonerelay.inbound.cleanup.submit import Acceptance, Principal, Submit, SubmitCall, SubmittedEnvelope
from zonerelay.inbound.listen.submit_socket import SubmitClient
from zonerelay.smtp.server.line_ends import BodyReader
from zonerelay.smtp.server.params import parse_mail, parse_rcpt
from zonerelay.smtp.server.paths import CommandError

PIECE = 64 * 1024


class Body:
    """A message as it comes behind 354, until the true end of data."""

    def __init__(self, server: StreamingServer) -> None:
        self._server = server
        self._reader = BodyReader()  # only CR LF . CR LF ends data, and dots are unstuffed
        self._has_begun = False

    @property
    def is_followed(self) -> bool:
        """The client has sent more than the message, without waiting for the reply."""
        return bool(self._reader.rest)

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the message. The first piece is asked for when the envelope has been accepted."""
        self._has_begun = True
        await self._server.push("354 End data with <CR><LF>.<CR><LF>")
        waiting = bytearray()
        while not self._reader.done:
            waiting += await self._read()
            if len(waiting) >= PIECE or self._reader.done:
                yield bytes(waiting)
                waiting.clear()

    async def discard(self) -> None:
        """Read what is left of a refused message, or else it would run as commands."""
        while self._has_begun and not self._reader.done:
            await self._read()

    async def _read(self) -> bytes:
        data = await self._server.read(PIECE)
        if not data:
            raise ConnectionResetError("the client has left")
        return self._reader.feed(data)


class StreamingServer(SMTP):
    """aiosmtpd's server with another DATA: no handler gets the message."""

    def __init__(self, submit: Submit, **more: Any) -> None:
        super().__init__(object(), data_size_limit=None, **more)
        self._submit = submit

    async def read(self, size: int) -> bytes:
        self._reset_timeout()
        return await self._reader.read(size)

    async def smtp_DATA(self, arg: str) -> None:  # noqa: N802 - aiosmtpd's name
        assert self.envelope is not None
        if await self.check_helo_needed():
            return
        if arg or not self.envelope.rcpt_tos:
            await self.push("501 5.5.4 No argument allowed" if arg else "503 5.5.1 Send RCPT first")
            return
        body = Body(self)
        try:
            call = SubmitCall(self._principal(), self._submitted_envelope())
            result = await self._submit(call, body.pieces())
            await body.discard()
        except CommandError as error:
            await self.push(str(error.reply))
            return
        finally:
            self.envelope = self._create_envelope()
        if isinstance(result, Acceptance):
            await self.push(f"250 2.0.0 OK queued as {result.id}")
        else:
            await self.push(str(result.reply))
        if body.is_followed and self.transport is not None:
            self.transport.close()  # PIPELINING is not offered, and what follows may be smuggled

    def _principal(self) -> Principal:
        session = self.session
        assert session is not None
        return Principal(
            protocol="ESMTP" if session.extended_smtp else "SMTP",
            address=str(session.peer[0]) if session.peer else "",
            helo=session.host_name or "",
        )

    def _submitted_envelope(self) -> SubmittedEnvelope:
        """Raise CommandError for what the relay's parser does not accept."""
        envelope = self.envelope
        assert envelope is not None
        sender = (envelope.mail_from or "").strip("<>")
        mail = parse_mail(" ".join((f"FROM:<{sender}>", *envelope.mail_options)))
        recipients = [parse_rcpt(f"TO:<{each}>", smtputf8=mail.smtputf8) for each in envelope.rcpt_tos]
        return SubmittedEnvelope(mail, recipients)


class ListenerController(Controller):
    """Serves on an event loop in a thread of its own, as every Controller."""

    def __init__(self, submit: Submit, **more: Any) -> None:
        super().__init__(object(), **more)
        self._submit = submit

    def factory(self) -> StreamingServer:
        return StreamingServer(self._submit, **self.SMTP_kwargs)


def main(host: str, port: str, *sockets: str) -> None:
    workers = SubmitClient(lambda: [Path(each) for each in sockets])
    controller = ListenerController(workers.submit, hostname=host, port=int(port))
    controller.start()
    try:
        threading.Event().wait()
    finally:
        controller.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
