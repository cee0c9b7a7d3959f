"""A receiver that looks at where its clients come from."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

BLOCKED = "Service unavailable; Client host [127.0.0.2] blocked using rbl.example"


class Guard:
    """A receiver that looks at where its clients come from: all of them, and those that came as far as MAIL.
    `refuses` addresses with `reply` at `verb`."""

    def __init__(self, refuses: Sequence[str], reply: str, verb: str) -> None:
        self.refuses, self.reply, self.verb = refuses, reply, verb
        self.connected: list[str] = []
        self.seen: list[str] = []
        self.port = 0
        self._server: asyncio.Server | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._server = await asyncio.start_server(self.serve, host, port)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = writer.get_extra_info("peername")[0]
        self.connected.append(client)
        try:
            greeting = self.reply if self.verb == "greeting" and client in self.refuses else "220 guard"
            writer.write(f"{greeting}\r\n".encode())
            while line := await reader.readline():
                verb = line.split(b" ", 1)[0].strip().upper().decode().replace("HELO", "EHLO")
                if verb == "MAIL":
                    self.seen.append(client)
                answer = "354 go" if verb == "DATA" else "250 ok"
                if verb == self.verb and client in self.refuses:
                    answer = self.reply
                writer.write(f"{answer}\r\n".encode())
                if answer.startswith("354"):
                    await reader.readuntil(b"\r\n.\r\n")
                    final = self.reply if self.verb == "dot" and client in self.refuses else "250 taken"
                    writer.write(f"{final}\r\n".encode())
                if verb == "QUIT" or answer.startswith("421"):
                    break
        except (OSError, EOFError):
            pass
        finally:
            writer.close()
