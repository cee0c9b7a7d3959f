"""A wheel alone: it makes its own configuration and units, and a relay that takes mail and has the page."""

import re
import shutil
import smtplib
import subprocess
import sys
import sysconfig
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.support.ports import free_ports, greets, wait_until
from zonerelay.config.load import load

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "zonerelay", "config", "systemd")


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of a fresh environment with the wheel; what the relay depends on is borrowed from here."""
    place = tmp_path_factory.mktemp("wheel")
    source, environment = place / "source", place / "environment"
    source.mkdir()
    for name in SOURCES:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source)
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", place, source)
    [wheel] = place.glob("zonerelay-*.whl")
    shutil.rmtree(source)
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    run(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    (Path(site) / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment / "bin" / "zonerelay"


def test_init_makes_a_relay_that_takes_mail_at_once(program: Path, tmp_path: Path) -> None:
    home = tmp_path / "relay"
    run(program, "init", home)
    config = home / "zonerelay.toml"
    smtp, http = free_ports(2)
    text = config.read_text()
    config.write_text(
        text.replace('address = "127.0.0.1:2525"', f'address = "127.0.0.1:{smtp}"')
        .replace('address = "127.0.0.1:8025"', f'address = "127.0.0.1:{http}"')
        .replace("#page = true", "page = true")
    )
    with (tmp_path / "log").open("wb") as log:
        relay = subprocess.Popen([program, "serve", "--config", config], stderr=log, cwd=tmp_path)
        try:
            assert wait_until(lambda: greets(smtp), timeout=30), (tmp_path / "log").read_text()
            with smtplib.SMTP("127.0.0.1", smtp, timeout=10) as client:
                assert client.sendmail("a@b.example", ["c@d.invalid"], b"Subject: x\r\n\r\nx\r\n") == {}
            page = urlopen(f"http://127.0.0.1:{http}/login", timeout=30).read().decode()
            for file in re.findall(r'(?:src|href)="(/static/[^"]+)"', page):
                assert urlopen(f"http://127.0.0.1:{http}{file}", timeout=30).status == 200
        finally:
            relay.terminate()
            assert relay.wait(60) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"relay", "log"}
    assert (home / "spool").is_dir()
    assert "accepted" in (tmp_path / "log").read_text()


def test_the_units_name_the_program_and_directory_they_are_for(program: Path, tmp_path: Path) -> None:
    told = run(program, "init", tmp_path)
    unit = (tmp_path / "zonerelay.service").read_text()
    assert f"\nExecStart={program} serve --config {tmp_path}/zonerelay.toml\n" in unit
    assert f"\nReadWritePaths={tmp_path}\n" in unit
    assert f"cp {tmp_path}/zonerelay.service {tmp_path}/zonerelay.socket /etc/systemd/system/\n" in told
    assert load(tmp_path / "zonerelay.toml").spool.path == tmp_path / "spool"
    if shutil.which("systemd-analyze"):
        run("systemd-analyze", "verify", tmp_path / "zonerelay.service", tmp_path / "zonerelay.socket")
