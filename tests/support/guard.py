"""A receiver that looks at where its clients come from."""

import asyncio
from collections.abc import Sequence

from tests.support.peer import Peer

BLOCKED = "Service unavailable; Client host [127.0.0.2] blocked using rbl.example"


class Guard(Peer):
    """`connected` are the addresses of all clients, `seen` of those that came as far as MAIL. `refuses`
    addresses with `reply` at `verb`."""

    def __init__(self, refuses: Sequence[str], reply: str, verb: str) -> None:
        super().__init__(self._converse)
        self.refuses, self.reply, self.verb = refuses, reply, verb
        self.connected: list[str] = []
        self.seen: list[str] = []

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = writer.get_extra_info("peername")[0]
        self.connected.append(client)
        refused = self.verb if client in self.refuses else ""
        writer.write(f"{self.reply if refused == 'greeting' else '220 guard'}\r\n".encode())
        while line := await reader.readline():
            verb = line.split(b" ", 1)[0].strip().upper().decode().replace("HELO", "EHLO")
            if verb == "MAIL":
                self.seen.append(client)
            answer = "354 go" if verb == "DATA" else "250 ok"
            if verb == refused:
                answer = self.reply
            writer.write(f"{answer}\r\n".encode())
            if answer.startswith("354"):
                await reader.readuntil(b"\r\n.\r\n")
                writer.write(f"{self.reply if refused == 'dot' else '250 taken'}\r\n".encode())
            if verb == "QUIT" or answer.startswith("421"):
                await writer.drain()
                writer.close()
                return
