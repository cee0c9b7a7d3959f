"""Clients of Mailpit's API, as test suites use them: mailpit-api from npm, mailpit-api-client from PyPI.

Each is fetched into `.cache` once, and run in a process of its own with a script of the test.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.programs import from_pypi, unpacked_from_npm

NPM = "mailpit-api@2.1.0"
PYPI = (
    "mailpit-api-client==1.0.0", "dataclasses-json==0.6.7", "marshmallow==3.26.1", "typing-inspect==0.9.0",
    "httpx==0.28.1", "httpcore==1.0.9", "h11==0.16.0", "anyio==4.11.0", "sniffio==1.3.1", "certifi", "idna",
)  # fmt: skip
"""Without what it says it needs and does not (ruff, invoke)."""
RUN_TIMEOUT = 60.0


def run_node(script: str, *words: str) -> str:
    """Runs a script with `MailpitClient`; returns what it prints."""
    client = f'import {{ MailpitClient }} from "{unpacked_from_npm(NPM) / "dist" / "index.mjs"}";\n'
    return _run(["node", "--input-type=module", "-e", client + script, "--", *words], {})


def run_python(script: str, *words: str) -> str:
    """Runs a script that can import `mailpit.client.api`; returns what it prints."""
    home = from_pypi("mailpit-api-client-1.0.0", *PYPI, options=("--no-deps",))
    return _run([sys.executable, "-c", script, *words], {"PYTHONPATH": str(home)})


def _run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        cwd=Path("/"),
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
