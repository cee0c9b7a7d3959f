"""A real Redis server of a test's own: Debian's, unpacked privately, in a temporary directory."""

import atexit
import contextlib
import functools
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.support.debian import UnpackedPackage, ready_package
from tests.support.ports import wait_until
from tests.support.servers import ServerProcess

PROGRAM = (
    "usr/bin/redis-check-rdb"  # the server itself: the other names of it are links with absolute targets
)
SAFE = {"appendonly": "yes", "appendfsync": "always", "no-appendfsync-on-rewrite": "no", "save": ""}


def unpacked() -> UnpackedPackage:
    return ready_package("redis-server", PROGRAM, also=("redis-tools",))


class RedisServer(ServerProcess):
    """`kill` and `start` are what a crash is."""

    def __init__(
        self,
        settings: Mapping[str, str] | None = None,
        *,
        port: int = 0,
        launcher: Sequence[str] = (),
        arguments: Sequence[str] = (),
    ) -> None:
        self.port = port
        self._launcher = launcher
        self._arguments = arguments
        # A short path of its own: a Unix socket's may not be longer than about a hundred octets.
        self.directory = Path(tempfile.mkdtemp(prefix="redis-"))
        self.socket = self.directory / "socket"
        self.url = f"redis://127.0.0.1:{port}/0" if port else f"unix://{self.socket}"
        self._settings = {**SAFE, **(settings or {}), "port": str(port)}

    def start(self) -> None:
        package = unpacked()
        options = [word for name, value in self._settings.items() for word in (f"--{name}", value)]
        place = ["--dir", str(self.directory), "--unixsocket", str(self.socket)]
        self.spawn(
            [*self._launcher, self._program(package), *self._arguments, *options, *place],
            self.directory / "log",
            environment={**os.environ, "LD_LIBRARY_PATH": package.library_path()},
        )
        assert wait_until(self._answers, timeout=20), (self.directory / "log").read_text()

    def _program(self, package: UnpackedPackage) -> Path:
        """What it is called decides what the program does."""
        program = self.directory / "redis-server"
        if not program.exists():
            program.symlink_to(package.path(PROGRAM))
        return program

    def _answers(self) -> bool:
        try:
            return self.ask("PING").startswith(b"+PONG")
        except OSError:
            return False

    def ask(self, *words: str) -> bytes:
        """One command with a short answer, as it comes."""
        with self._asked(words) as connection:
            answer = b""
            while not answer.endswith(b"\r\n"):
                answer += connection.recv(65536)
            return answer

    def query(self, *words: str) -> bytes:
        """One command with a long answer; what it takes is up to who reads it."""
        with self._asked(words, ("QUIT",)) as connection, connection.makefile("rb") as answer:
            return answer.read()

    @contextlib.contextmanager
    def _asked(self, *commands: Sequence[str]) -> Iterator[socket.socket]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(5)
            connection.connect(str(self.socket))
            for words in commands:
                parts = [f"${len(word.encode())}\r\n{word}\r\n" for word in words]
                connection.sendall(f"*{len(words)}\r\n{''.join(parts)}".encode())
            yield connection

    def configure(self, name: str, value: str) -> None:
        assert self.ask("CONFIG", "SET", name, value) == b"+OK\r\n"

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        shutil.rmtree(self.directory, ignore_errors=True)


@functools.cache
def shared_server() -> RedisServer:
    """One for everybody who brings a key prefix of his own; it ends with the test run."""
    server = RedisServer()
    server.start()
    atexit.register(server.__exit__)
    return server
