"""A real browser for tests: Debian's headless Chromium, unpacked into `.cache` and not installed, driven by
playwright; and axe-core from npm, which judges how accessible a page is.

The font comes along with a configuration of its own, for a bare machine has none and Chromium ends without.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

from tests.support.debian import ready_package
from tests.support.locks import locked
from tests.support.programs import unpacked_from_npm

AXE = "4.14.1"
LAUNCH_TIMEOUT = 120_000
_PROGRAM = "usr/lib/chromium/chromium-headless-shell"
_FONT = "usr/share/fonts/truetype/dejavu/DejaVuSans.ttf"


@contextmanager
def browser() -> Iterator[Browser]:
    chromium = ready_package(
        "chromium-headless-shell", _PROGRAM, _FONT, also=("chromium-common", "fonts-dejavu-core")
    )
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
    return (unpacked_from_npm(f"axe-core@{AXE}") / "axe.min.js").read_text()
