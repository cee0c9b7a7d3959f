"""`zonerelay sandbox` as a process, and requests to pages of a relay."""

import http.client
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.ports import LOOPBACK, wait_until
from tests.support.process import PROGRAM

_ADDRESS = re.compile(r"listens on \S+?:(\d+)(?:.|\n)*?http://\S+:(\d+)/#(zrt_\w+)(?:.|\n)*greylisted")


@contextmanager
def sandbox_process(directory: Path) -> Iterator[tuple[int, int, str]]:
    """Its ports for SMTP and HTTP, and its token."""
    output = directory / "output"
    with output.open("wb") as file:
        process = subprocess.Popen([str(PROGRAM), "sandbox"], stdout=file, stderr=file)
    try:
        assert wait_until(lambda: _ADDRESS.search(output.read_text()) is not None, timeout=60)
        found = _ADDRESS.search(output.read_text())
        assert found is not None
        yield int(found[1]), int(found[2]), found[3]
    finally:
        process.terminate()
        process.wait(30)


def ask(
    port: int, method: str, path: str, body: str | None = None, **fields: str
) -> tuple[int, dict[str, str], bytes]:
    """The status, the fields and the body of the answer; a field is named with `_` for `-`."""
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=30)
    try:
        named = {name.replace("_", "-"): value for name, value in fields.items()}
        connection.request(method, path, body, named)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()
