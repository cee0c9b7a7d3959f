"""PgBouncer in front of a PostgreSQL server: Debian's, unpacked privately, on a free loopback port."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.debian import UnpackedPackage
from tests.support.ports import LOOPBACK, free_port
from tests.support.postgres import PostgresServer
from tests.support.servers import running_server

PROGRAM = "usr/sbin/pgbouncer"


@contextlib.contextmanager
def pooled(server: PostgresServer, mode: str, *, size: int = 20) -> Iterator[str]:
    """Yield the pool's URL. `mode` is its pool_mode, `size` its default_pool_size; it refuses to be root."""
    package, port = UnpackedPackage("pgbouncer"), free_port()
    package.ensure([PROGRAM])
    with tempfile.TemporaryDirectory(prefix="pgbouncer-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        directory.chmod(0o777)
        log, settings, users = (directory / each for each in ("log", "pgbouncer.ini", "users"))
        users.write_text('"mail" ""\n')
        settings.write_text(
            f"[databases]\npostgres = host={LOOPBACK} port={server.port} user=mail\n"
            f"[pgbouncer]\nlisten_addr = {LOOPBACK}\nlisten_port = {port}\nunix_socket_dir =\n"
            f"auth_type = any\nauth_file = {users}\npool_mode = {mode}\n"
            f"default_pool_size = {size}\nlogfile = {log}\n"
        )
        become = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
        command = [*(become if os.geteuid() == 0 else []), package.path(PROGRAM), settings]
        environment = {"LD_LIBRARY_PATH": package.library_path()}
        with running_server(
            command,
            directory / "output",
            lambda: log.exists() and "process up" in log.read_text(),
            environment=environment,
        ):
            yield f"postgresql://mail@{LOOPBACK}:{port}/postgres"
