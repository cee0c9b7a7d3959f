"""What acceptance tests share: a sink in this process, relays as real processes.

Some need root: to mount a small file system, to run Postfix. Anybody else's run skips them.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.submission import Papers, add_user
from tests.support.command import Shell
from tests.support.postfix import PostfixTools
from tests.support.sink import Sink

_SERVERS = "needs root: Postfix, Exim and OpenSMTPD start as root and become other users"
NEED_ROOT = {
    "test_chunking_peers.py": _SERVERS,
    "test_debian_package.py": "needs root: makes a small Debian and changes root into it",
    "test_full_disk.py": "needs root: mounts a small file system",
    "test_nodes.py": "needs root: joins network namespaces by a bridge",
    "test_privileged_port.py": "needs root: gives up its capabilities in a network of its own",
    "test_receivers.py": _SERVERS,
    "test_sending_servers.py": _SERVERS,
    "test_smarthosts.py": _SERVERS,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.geteuid() != 0:
        for item in items:
            if item.path.parent == Path(__file__).parent and item.path.name in NEED_ROOT:
                item.add_marker(pytest.mark.skip(reason=NEED_ROOT[item.path.name]))


@pytest.fixture
def sink() -> Iterator[Sink]:
    """A receiver that takes everything, also while the test waits for a process."""
    with Sink() as sink:
        yield sink


@pytest.fixture
def zonerelay(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


@pytest.fixture
def open_path(tmp_path: Path) -> Path:
    """A temporary directory that other users can pass through, as Postfix's own must."""
    for folder in (*tmp_path.parents, tmp_path):
        if folder != Path("/") and folder.stat().st_mode & 0o001 == 0:
            folder.chmod(0o711)
    return tmp_path


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return Papers.make(tmp_path_factory.mktemp("papers"))


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_user(tmp_path_factory.mktemp("users"))


@pytest.fixture(scope="session")
def postfix_tools() -> PostfixTools:
    return PostfixTools()
