"""A wire between clients and a relay that breaks at the worst moment.

Whatever passes is passed on, in clear text only. For recipients in `cuts` the connection is closed when the
relay has answered the final dot, and before the client has that answer; once for each.
"""

import contextlib
import re
import socket
import threading
from collections import Counter
from typing import Self

from tests.support.ports import LOOPBACK

PATIENCE = 60.0

_RECIPIENT = re.compile(rb"^RCPT TO:<([^>]*)>", re.IGNORECASE | re.MULTILINE)
_END = b"\r\n.\r\n"


class Cutter:
    """Listens in threads while it is entered; `sessions` counts those that named a recipient."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listening = socket.create_server((LOOPBACK, 0))
        self.port: int = self._listening.getsockname()[1]
        self.cuts: set[str] = set()
        self.sessions: Counter[str] = Counter()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._pass_on, args=(client,), daemon=True).start()

    def _pass_on(self, client: socket.socket) -> None:
        with client, socket.create_connection((LOOPBACK, self._target), timeout=PATIENCE) as relay:
            client.settimeout(PATIENCE)
            session = _Session(client, relay)
            answers = threading.Thread(target=session.pass_answers, args=(self.cuts,), daemon=True)
            answers.start()
            session.pass_commands()
            answers.join()
            self.sessions.update(session.recipients)


class _Session:
    def __init__(self, client: socket.socket, relay: socket.socket) -> None:
        self._client, self._relay = client, relay
        self.recipients: set[str] = set()
        self._said = b""

    def pass_commands(self) -> None:
        with contextlib.suppress(OSError):
            while octets := self._client.recv(65536):
                self._said += octets
                self.recipients.update(each.decode() for each in _RECIPIENT.findall(self._said))
                self._relay.sendall(octets)
        with contextlib.suppress(OSError):
            self._relay.shutdown(socket.SHUT_WR)

    def pass_answers(self, cuts: set[str]) -> None:
        with contextlib.suppress(OSError):
            while octets := self._relay.recv(65536):
                if _END in self._said and (cut := cuts & self.recipients):
                    cuts -= cut
                    break
                self._client.sendall(octets)
        with contextlib.suppress(OSError):
            self._client.shutdown(socket.SHUT_RDWR)
