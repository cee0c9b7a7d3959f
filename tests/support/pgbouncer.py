"""PgBouncer in front of a PostgreSQL server: Debian's, unpacked privately, on a free loopback port."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.debian import UnpackedPackage
from tests.support.ports import LOOPBACK, free_port, wait_until
from tests.support.postgres import PostgresServer

PROGRAM = "usr/sbin/pgbouncer"


class PgBouncer:
    """`mode` is its pool_mode, `size` its default_pool_size. It refuses to run as root."""

    def __init__(self, server: PostgresServer, mode: str, *, size: int = 20) -> None:
        self._package = UnpackedPackage("pgbouncer")
        self._package.ensure([PROGRAM])
        self._port = free_port()
        self._directory = Path(tempfile.mkdtemp(prefix="pgbouncer-"))
        self._directory.chmod(0o777)
        self._settings = self._directory / "pgbouncer.ini"
        users = self._directory / "users"
        users.write_text('"mail" ""\n')
        self._settings.write_text(
            f"[databases]\npostgres = host={LOOPBACK} port={server.port} user=mail\n"
            f"[pgbouncer]\nlisten_addr = {LOOPBACK}\nlisten_port = {self._port}\nunix_socket_dir =\n"
            f"auth_type = any\nauth_file = {users}\npool_mode = {mode}\n"
            f"default_pool_size = {size}\n"
            f"logfile = {self._directory / 'log'}\n"
        )
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"postgresql://mail@{LOOPBACK}:{self._port}/postgres"

    def __enter__(self) -> Self:
        become = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
        self._process = subprocess.Popen(
            [*(become if os.geteuid() == 0 else []), str(self._package.path(PROGRAM)), str(self._settings)],
            env={**os.environ, "LD_LIBRARY_PATH": self._package.library_path()},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        log = self._directory / "log"
        assert wait_until(lambda: log.exists() and "process up" in log.read_text(), timeout=20)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)
