"""A real browser for tests: Debian's headless Chromium, unpacked into `.cache` and not installed, driven by
playwright; and axe-core from npm, which judges how accessible a page is.

The font comes along with a configuration of its own, for a bare machine has none and Chromium ends without.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

from tests.support.debian import CACHE, UnpackedPackage
from tests.support.locks import locked

AXE = "4.14.1"
NPM_TIMEOUT = 300.0
LAUNCH_TIMEOUT = 120_000
_PROGRAM = "usr/lib/chromium/chromium-headless-shell"
_FONT = "usr/share/fonts/truetype/dejavu/DejaVuSans.ttf"


class BrowserError(Exception):
    """The browser or axe-core cannot be had; the text says what to do."""


@contextmanager
def browser() -> Iterator[Browser]:
    chromium = UnpackedPackage("chromium-headless-shell", also=("chromium-common", "fonts-dejavu-core"))
    chromium.ensure([_PROGRAM, _FONT])
    fonts = chromium.home / "fonts.conf"
    with locked(chromium.home):
        fonts.write_text(
            f"<fontconfig><dir>{chromium.path(_FONT).parent}</dir>"
            f"<cachedir>{chromium.home / 'fonts'}</cachedir></fontconfig>"
        )
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(
            executable_path=str(chromium.path(_PROGRAM)),
            args=["--no-sandbox"],  # it refuses root otherwise; the pages are ours
            env={"LD_LIBRARY_PATH": chromium.library_path(), "FONTCONFIG_FILE": str(fonts)},
            timeout=LAUNCH_TIMEOUT,
        )
        yield opened
        opened.close()


def judged(page: Page, axe: str, rules: Sequence[str] = ()) -> list[dict[str, Any]]:
    """What axe-core, whose script is `axe`, finds serious or critical; by some `rules` or by all."""
    page.evaluate(axe)
    only = {"runOnly": {"type": "rule", "values": list(rules)}} if rules else {}
    found: dict[str, Any] = page.evaluate("only => axe.run({...only, resultTypes: ['violations']})", only)
    return [
        {"rule": each["id"], "at": [node["html"] for node in each["nodes"]]}
        for each in found["violations"]
        if each["impact"] in ("serious", "critical")
    ]


def axe_script() -> str:
    return (_axe() / "package" / "axe.min.js").read_text()


def _axe() -> Path:
    home = CACHE / f"axe-core-{AXE}"
    with locked(home):
        if not (home / "package" / "axe.min.js").exists():
            npm = shutil.which("npm")
            if npm is None:
                raise BrowserError("no npm here, which axe-core comes from: apt-get install nodejs npm")
            command = [npm, "pack", "--silent", f"axe-core@{AXE}"]
            done = subprocess.run(
                command, cwd=home, capture_output=True, text=True, timeout=NPM_TIMEOUT, check=False
            )
            if done.returncode:
                raise BrowserError(f"npm pack axe-core@{AXE} failed:\n{done.stderr[-2000:]}")
            shutil.unpack_archive(home / f"axe-core-{AXE}.tgz", home)
    return home
