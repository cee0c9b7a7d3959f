"""OpenDKIM from Debian as a judge of signatures: its test mode reads a message and key records from files."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.support.debian import UnpackedPackage

PROGRAM = "usr/sbin/opendkim"
TIMEOUT = 20.0

_RESULT = re.compile(r"^\s*dkim=(\w+)[^;\n]*\bheader\.a=([a-z0-9-]+)", re.MULTILINE)


class OpenDkim:
    def __init__(self, directory: Path, published: Mapping[str, str]) -> None:
        self._package = UnpackedPackage("opendkim")
        self._package.ensure([PROGRAM])
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
