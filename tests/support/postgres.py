"""A real PostgreSQL server in a temporary directory, on a Unix socket and a free loopback port.

The machine's own programs are used if it has them; else the Debian package is unpacked into `.cache` (see
`debian`), never installed. PostgreSQL refuses to run as root: then it runs as an existing system user. Its
settings are the defaults but for memory and sockets, so what it says is durable is synced.
"""

import atexit
import contextlib
import functools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from tests.support.debian import DebianError, UnpackedPackage, providers
from tests.support.meters import family
from tests.support.ports import LOOPBACK, free_port
from tests.support.servers import ServerProcess

PROGRAMS = ("initdb", "postgres", "psql")
USERS = ("postgres", "nobody", "daemon")
START_TIMEOUT = 30.0
PASSWORD = "correct-horse"
SETTINGS = {
    "listen_addresses": LOOPBACK,
    "shared_buffers": "32MB",
    "max_connections": "100",
    "max_wal_size": "256MB",
    "log_min_messages": "warning",
    "dynamic_shared_memory_type": "mmap",
}


class PostgresError(Exception):
    """PostgreSQL could not be had or did not start; the text says what to do."""


class PostgresPrograms:
    """Where they are, and the environment that they need."""

    def __init__(self) -> None:
        homes = Path("/usr/lib/postgresql").glob("*/bin")
        installed = sorted(homes, key=lambda home: float(home.parent.name))
        self.environment = {**os.environ, "LC_ALL": "C", "TZ": "UTC"}
        for name in [name for name in self.environment if name.startswith("PG")]:
            del self.environment[name]
        if installed and all((installed[-1] / name).exists() for name in PROGRAMS):
            self.bin = installed[-1]
            return
        try:
            names = providers("postgresql", r"postgresql-\d+")
            client = [name.replace("postgresql", "postgresql-client") for name in names]
            package = UnpackedPackage(names[0] if names else "postgresql-15", also=client)
            package.ensure([f"usr/lib/postgresql/*/bin/{name}" for name in PROGRAMS])
        except DebianError as error:
            raise PostgresError(str(error)) from error
        self.bin = package.path("usr/lib/postgresql/*/bin")
        self.environment["LD_LIBRARY_PATH"] = package.library_path()


class PostgresServer(ServerProcess):
    """Started at once. `kill` and `start` again is a crash; everything goes with `stop`."""

    def __init__(
        self,
        settings: Mapping[str, str] | None = None,
        *,
        auth: str = "trust",
        parent: Path | None = None,
        launcher: Sequence[str] = (),
    ) -> None:
        """`launcher` is put before the server's command line, and runs as whoever runs this."""
        self._programs = PostgresPrograms()
        self._launcher = launcher
        self.directory = Path(tempfile.mkdtemp(prefix="zonerelay-postgres-", dir=parent))
        self.data = self.directory / "data"
        self.port = free_port()
        self._owner = _unprivileged()
        if self._owner is not None:
            os.chown(self.directory, self._owner.pw_uid, self._owner.pw_gid)
        try:
            self._make(auth)
            self._configure({**SETTINGS, "unix_socket_directories": str(self.directory), **(settings or {})})
            self.start()
        except BaseException:
            self.stop()
            raise

    @property
    def url(self) -> str:
        return f"postgresql://mail@{LOOPBACK}:{self.port}/postgres"

    @property
    def socket_url(self) -> str:
        return f"postgresql:///postgres?host={self.directory}&port={self.port}&user=mail"

    def start(self) -> None:
        program = str(self._programs.bin / "postgres")
        self.process = self._popen(program, "-D", str(self.data), launcher=self._launcher)
        deadline = time.monotonic() + START_TIMEOUT
        while self.psql("SELECT 1", check=False) != "1":
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise PostgresError(f"PostgreSQL did not start:\n{self.log()}")
            time.sleep(0.02)

    def kill(self) -> None:
        """As a crash of the machine would: no process of it says good-bye."""
        assert self.process is not None
        # The first one first, or it would start others for those that are gone.
        for pid in (self.pid, *(family(self.pid) - {self.pid})):
            with contextlib.suppress(ProcessLookupError):  # backends end by themselves at any moment
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        (self.data / "postmaster.pid").unlink(missing_ok=True)

    def shut_down(self) -> None:
        """In good order, but connections are cut."""
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        self.process.wait(START_TIMEOUT)

    def stop(self) -> None:
        if self.process is not None and self.running:
            self.signal(signal.SIGQUIT)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def psql(self, statement: str, *, check: bool = True) -> str:
        done = subprocess.run(
            [
                *(str(self._programs.bin / "psql"), "-XAtq", "-U", "mail", "-d", "postgres"),
                *("-h", str(self.directory), "-p", str(self.port), "-c", statement),
            ],
            env={**self._programs.environment, "PGPASSWORD": PASSWORD},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if check and done.returncode:
            raise PostgresError(done.stderr.strip())
        return done.stdout.strip()

    def set(self, name: str, value: str) -> None:
        """Change a setting of the running server."""
        self.psql(f"ALTER SYSTEM SET {name} = '{value}'")
        self.psql("SELECT pg_reload_conf()")
        deadline = time.monotonic() + START_TIMEOUT
        while self.psql(f"SHOW {name}") != value and time.monotonic() < deadline:
            time.sleep(0.02)

    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")[-4000:]

    def _make(self, auth: str) -> None:
        secret = self.directory / "password"
        secret.write_text(PASSWORD)
        secret.chmod(0o644)
        made = self._popen(
            *(str(self._programs.bin / "initdb"), "-D", str(self.data), "-U", "mail", "-E", "UTF8"),
            *("--locale=C", "--no-sync", f"--auth={auth}", f"--pwfile={secret}"),
        )
        if made.wait(60):
            raise PostgresError(f"initdb failed:\n{self.log()}")

    def _configure(self, settings: Mapping[str, str]) -> None:
        lines = [f"{name} = '{value}'" for name, value in {**settings, "port": str(self.port)}.items()]
        with (self.data / "postgresql.conf").open("a") as file:
            file.write("\n" + "\n".join(lines) + "\n")

    def _popen(self, *command: str, launcher: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        owner = self._owner
        become = [] if owner is None else ["setpriv", f"--reuid={owner.pw_uid}", f"--regid={owner.pw_gid}"]
        groups = ["--clear-groups"] if become else []
        with (self.directory / "log").open("ab") as log:
            return subprocess.Popen(
                [*launcher, *become, *groups, *command],
                cwd=self.directory,
                env=self._programs.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


@functools.cache
def shared_postgres() -> PostgresServer:
    """One for the whole run; each spool has a schema of its own there. Who breaks a server starts another."""
    server = PostgresServer()
    atexit.register(server.stop)
    return server


def _unprivileged() -> pwd.struct_passwd | None:
    """Whom to run as when this is root."""
    if os.geteuid() != 0:
        return None
    for name in USERS:
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise PostgresError("PostgreSQL does not run as root, and there is no other user to run it as")
