"""Haraka as a server that takes everything and passes it on, fetched from npm into `.cache`, never installed.

Needs Node and npm on the machine. Two of its dependencies are pinned to versions that every mirror has; its
optional plug-ins and what would have to be compiled are left out. Its files are below `directory`.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.ports import LOOPBACK, free_port, greets
from tests.support.programs import from_npm
from tests.support.senders import Server
from tests.support.servers import running_server

VERSION = "3.1.5"
NAME = "haraka.test"

_OVERRIDES = {"encoding-japanese": "2.2.0", "libqp": "2.1.1"}
_CONNECTION = "[main]\nsmtputf8=true\n[haproxy]\nhosts[] =\n[headers]\n[max]\n[uuid]\n[message]\n"
_ACCEPT = """\
exports.register = function () { this.register_hook('rcpt', 'take') }
exports.take = function (next, connection) { connection.relaying = true; next(OK) }
"""

# RFC 7919's ffdhe2048. Without the file each server would look for primes of its own, for half a minute.
_DHPARAMS = """\
-----BEGIN DH PARAMETERS-----
MIIBCAKCAQEA//////////+t+FRYortKmq/cViAnPTzx2LnFg84tNpWp4TZBFGQz
+8yTnc4kmz75fS/jY2MMddj2gbICrsRhetPfHtXV/WVhJDP1H18GbtCFY2VVPe0a
87VXE15/V8k1mE8McODmi3fipona8+/och3xWKE2rec1MKzKT0g6eXq8CrGCsyT7
YdEIqUuyyOP7uWrat2DX9GgdT0Kj3jlN9K5W7edjcrsZCwenyO4KbXCeAvzhzffi
7MA0BM0oNC9hkXL+nOmFg/+OTxIy7vKBg8P+OxtMb61zO7X8vC7CIAXFjvGDfRaD
ssbzSibBsu/6iGtCOGEoXJf//////////wIBAg==
-----END DH PARAMETERS-----
"""


class HarakaReceiver:
    """`certificate` and `key` make it offer STARTTLS."""

    def __init__(self, directory: Path, *, certificate: Path | None = None, key: Path | None = None) -> None:
        self.log = directory / "log"
        self._directory = directory
        self._home = from_npm(f"haraka-{VERSION}", {"Haraka": VERSION}, overrides=_OVERRIDES)
        self._certificate, self._key = certificate, key

    @contextmanager
    def receiving(self, next_hop: Server) -> Iterator[int]:
        """It listens on a port of its own; what it takes is forwarded to `next_hop` before it answers."""
        port = free_port()
        self._lay_out(port, next_hop)
        command = [self._home / "node_modules" / ".bin" / "haraka", "-c", self._directory]
        with running_server(command, self.log, lambda: greets(port)):
            yield port

    def _lay_out(self, port: int, next_hop: Server) -> None:
        config, plugins = self._directory / "config", self._directory / "plugins"
        for folder in (config, plugins):
            folder.mkdir(parents=True, exist_ok=True)
        (plugins / "take.js").write_text(_ACCEPT)
        names = ["take", "queue/smtp_forward"]
        if self._certificate is not None and self._key is not None:
            shutil.copy(self._certificate, config / "tls_cert.pem")
            shutil.copy(self._key, config / "tls_key.pem")
            (config / "dhparams.pem").write_text(_DHPARAMS)
            names.insert(0, "tls")
        files = {
            "me": NAME,
            "smtp.ini": f"listen={LOOPBACK}:{port}\nnodes=0\n",
            "plugins": "\n".join(names),
            "smtp_forward.ini": f"host={LOOPBACK}\nport={next_hop.port}\nenable_outbound=true\n",
            # It reads these without a look whether they are there.
            "connection.ini": _CONNECTION,
            "loglevel": "LOGPROTOCOL",
        }
        for name, text in files.items():
            (config / name).write_text(f"{text}\n")
