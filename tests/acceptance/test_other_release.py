"""README names two releases of Debian: on the one that this machine does not have, the tests pass as well."""

import subprocess
from pathlib import Path

import pytest

from tests.support.chroot import OWN_RELEASE, Chroot

ROOT = Path(__file__).parents[2]
OTHER = {"bookworm": "trixie", "trixie": "bookworm"}
PACKAGES = ("git", "make", "python3-venv", "ca-certificates")
"""What README asks for, and the certificates of registries."""
TIERS = "tests/unit tests/dialogs"
TIMEOUT = 1200.0


@pytest.mark.proof
@pytest.mark.skipif(OWN_RELEASE not in OTHER, reason="needs Debian 12 or 13")
def test_the_tests_pass_on_the_other_release(tmp_path: Path) -> None:
    other = Chroot(tmp_path / "root", OTHER[OWN_RELEASE], PACKAGES)
    subprocess.run(["git", "clone", "--quiet", ROOT, other.root / "zonerelay"], check=True)
    shown = other.run("make", "-C", "/zonerelay", "test", f"ARGS=-q {TIERS}", timeout=TIMEOUT)
    assert " passed" in shown
    assert " skipped" not in shown
