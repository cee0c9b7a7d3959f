"""OpenStack Swift with its S3 API on loopback: wheels in a private environment in `.cache`, never installed.

Proxy, account, container and object server, one copy of everything in a temporary directory.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.debian import CACHE
from tests.support.locks import locked
from tests.support.ports import LOOPBACK, accepts, free_ports, wait_until

VERSION = "2.38.3"
KEY, SECRET = "test:tester", "testing"
PIP_TIMEOUT = 300.0
KINDS = ("account", "container", "object")

_RINGS = """\
import sys
from swift.common.ring import RingBuilder
folder, *ports = sys.argv[1:]
for kind, port in zip(("account", "container", "object"), ports):
    builder = RingBuilder(4, 1, 1)
    place = {"ip": "127.0.0.1", "port": int(port), "device": "d1"}
    again = {"replication_ip": "127.0.0.1", "replication_port": int(port)}
    builder.add_dev({"region": 1, "zone": 1, "weight": 1, **place, **again})
    builder.rebalance()
    builder.get_ring().save(f"{folder}/{kind}.ring.gz")
"""
_HASH = """\
[swift-hash]
swift_hash_path_prefix = zonerelay
swift_hash_path_suffix = tests
[storage-policy:0]
name = one
default = yes
"""
_COMMON = """\
[DEFAULT]
bind_ip = {host}
bind_port = {port}
swift_dir = {folder}
devices = {folder}/devices
mount_check = false
fallocate_reserve = 0
workers = 0
user = {user}
log_address = {folder}/log
"""
_STORAGE = """\
[pipeline:main]
pipeline = {kind}-server
[app:{kind}-server]
use = egg:swift#{kind}
"""
_PROXY = """\
[pipeline:main]
pipeline = catch_errors cache s3api tempauth bulk slo proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:cache]
use = egg:swift#memcache
memcache_servers = 127.0.0.1:1
[filter:s3api]
use = egg:swift#s3api
auth_pipeline_check = false
location = us-east-1
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = testing .admin
[filter:bulk]
use = egg:swift#bulk
[filter:slo]
use = egg:swift#slo
"""


class SwiftError(Exception):
    """It cannot be had or does not start; the text says why."""


class SwiftServer:
    """Started and stopped by `with`."""

    def __init__(self) -> None:
        self._home = CACHE / f"swift-{VERSION}"
        with locked(self._home):
            self._fetch()
        self._folder = Path(tempfile.mkdtemp(prefix="swift-"))
        *self._ports, self.port = free_ports(4)
        self.url = f"http://{LOOPBACK}:{self.port}"
        self._processes: list[subprocess.Popen[bytes]] = []

    def _fetch(self) -> None:
        if self._program("proxy-server").exists():
            return
        python = self._home / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", str(self._home)], check=True, timeout=PIP_TIMEOUT)
        done = subprocess.run(
            [str(python), "-m", "pip", "install", "-q", f"swift=={VERSION}"],
            capture_output=True,
            text=True,
            timeout=PIP_TIMEOUT,
            check=False,
        )
        if done.returncode:
            raise SwiftError(f"pip install swift=={VERSION} failed:\n{done.stderr[-2000:]}")

    def _program(self, name: str) -> Path:
        return self._home / "bin" / f"swift-{name}"

    def _lay_out(self) -> None:
        (self._folder / "devices" / "d1").mkdir(parents=True)
        (self._folder / "swift.conf").write_text(_HASH)
        names = (*KINDS, "proxy")
        for kind, port in zip(names, (*self._ports, self.port), strict=True):
            common = _COMMON.format(host=LOOPBACK, port=port, folder=self._folder, user=Path.home().owner())
            rest = _PROXY if kind == "proxy" else _STORAGE.format(kind=kind)
            (self._folder / f"{kind}.conf").write_text(common + rest)
        words = [str(self._home / "bin" / "python"), "-W", "ignore", "-c", _RINGS, str(self._folder)]
        subprocess.run([*words, *map(str, self._ports)], check=True, timeout=60)

    def __enter__(self) -> Self:
        try:
            self._lay_out()
            with (self._folder / "out").open("wb") as log:
                for kind in (*KINDS, "proxy"):
                    words = [str(self._program(f"{kind}-server")), str(self._folder / f"{kind}.conf")]
                    self._processes.append(subprocess.Popen(words, stdout=log, stderr=log))
            if not wait_until(lambda: all(map(accepts, (*self._ports, self.port))), timeout=60):
                raise SwiftError(f"Swift does not answer:\n{(self._folder / 'out').read_text()[-2000:]}")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
