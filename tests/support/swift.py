"""OpenStack Swift with its S3 API on loopback: wheels in a private environment in `.cache`, never installed.

Proxy, account, container and object server, one copy of everything in a temporary directory.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from tests.support.ports import LOOPBACK, accepts, free_ports
from tests.support.programs import fetched
from tests.support.servers import running_server

VERSION = "2.38.3"
KEY, SECRET = "test:tester", "testing"
TIMEOUT = 300.0
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


@contextmanager
def swift_server() -> Iterator[str]:
    """Yield the URL of its proxy."""
    home = fetched(f"swift-{VERSION}", _fetch)
    ports = dict(zip((*KINDS, "proxy"), free_ports(4), strict=True))
    with tempfile.TemporaryDirectory(prefix="swift-") as name, ExitStack() as stack:
        folder = Path(name)
        _lay_out(home, folder, ports)
        for kind, port in ports.items():
            command = [home / "bin" / f"swift-{kind}-server", folder / f"{kind}.conf"]
            stack.enter_context(running_server(command, folder / "out", partial(accepts, port), timeout=60))
        yield f"http://{LOOPBACK}:{ports['proxy']}"


def _fetch(home: Path) -> None:
    for words in (["venv", str(home)], ["pip", "--python", str(home), "install", "-q", f"swift=={VERSION}"]):
        subprocess.run([sys.executable, "-m", *words], check=True, timeout=TIMEOUT)


def _lay_out(home: Path, folder: Path, ports: dict[str, int]) -> None:
    (folder / "devices" / "d1").mkdir(parents=True)
    (folder / "swift.conf").write_text(_HASH)
    for kind, port in ports.items():
        common = _COMMON.format(host=LOOPBACK, port=port, folder=folder, user=Path.home().owner())
        rest = _PROXY if kind == "proxy" else _STORAGE.format(kind=kind)
        (folder / f"{kind}.conf").write_text(common + rest)
    words = [str(home / "bin" / "python"), "-W", "ignore", "-c", _RINGS, str(folder)]
    subprocess.run([*words, *(str(ports[kind]) for kind in KINDS)], check=True, timeout=60)
