"""OpenDKIM from Debian: as a judge of signatures (its test mode reads a message and key records from files),
and as a milter that signs.
"""

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.support.debian import ready_package
from tests.support.servers import running_server

PROGRAM = "usr/sbin/opendkim"
TIMEOUT = 20.0

_RESULT = re.compile(r"^\s*dkim=(\w+)[^;\n]*\bheader\.a=([a-z0-9-]+)", re.MULTILINE)


class OpenDkim:
    def __init__(self, directory: Path, published: Mapping[str, str]) -> None:
        self._package = ready_package("opendkim", PROGRAM)
        self._directory = directory
        keys = directory / "keys"
        keys.write_text("".join(f"{name} {record}\n" for name, record in published.items()))
        self._config = directory / "opendkim.conf"
        self._config.write_text(f"Mode v\nTestPublicKeys {keys}\n")

    def verdicts(self, message: bytes) -> dict[str, str]:
        """`pass` or `fail` for each algorithm that has signed."""
        path = self._directory / "message"
        path.write_bytes(message)
        done = subprocess.run(
            [str(self._package.path(PROGRAM)), "-t", str(path), "-x", str(self._config), "-vv"],
            env={**os.environ, "LD_LIBRARY_PATH": self._package.library_path()},
            capture_output=True,
            timeout=TIMEOUT,
            check=True,
        )
        return {algorithm: verdict for verdict, algorithm in _RESULT.findall(done.stdout.decode("latin-1"))}


@contextlib.contextmanager
def signing_milter(
    directory: Path, *, domain: str, selector: str, key: Path, launcher: Sequence[str] = ()
) -> Iterator[None]:
    """A milter on the Unix socket `opendkim.sock` of the directory, for every user of the machine."""
    package = ready_package("opendkim", PROGRAM)
    socket, config = directory / "opendkim.sock", directory / "opendkim.conf"
    config.write_text(
        f"Mode s\nDomain {domain}\nSelector {selector}\nKeyFile {key}\nSocket local:{socket}\nUMask 000\n"
        "Canonicalization relaxed/relaxed\nInternalHosts 127.0.0.0/8\nRequireSafeKeys no\nSyslog no\n"
    )
    environment = {"LD_LIBRARY_PATH": package.library_path()}
    command = [*launcher, package.path(PROGRAM), "-f", "-x", config]
    with running_server(command, directory / "opendkim.log", socket.exists, environment=environment):
        yield
