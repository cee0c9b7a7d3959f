"""The Debian packages in a small Debian of their own: installed without a network, upgraded and purged.

Mail that waits in the queue is there after each step, until it has been delivered.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import smtplib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.chroot import Chroot
from tests.support.ports import LOOPBACK, free_ports, greets, wait_until
from tests.support.sink import Sink

ROOT = Path(__file__).parents[2]
DPKG = ("dpkg", "--force-unsafe-io")
QUICK = {"DPKG_DEB_COMPRESSOR_TYPE": "none", "DPKG_DEB_COMPRESSOR_LEVEL": "0"}
LETTER = "From: app@b.example\nTo: Ann <ann@d.example>\nSubject: x\n\nHello\n"
BUILD_TIMEOUT = 600.0
NOT_INSTALLED = ("CHANGELOG.md", "config/docker.toml", "tests/acceptance/test_applications.py")


class Machine(Chroot):
    """A Debian with the packages beside it, and with a relay of the given ports once that is installed."""

    def __init__(self, root: Path, packages: Path, next_hop: int) -> None:
        super().__init__(root)
        self.config = root / "etc/zonerelay/zonerelay.toml"
        self.state = root / "var/lib/zonerelay"
        self._next_hop = next_hop
        shutil.copytree(packages, root / "packages")

    def install(self, pattern: str, *, status: int = 0) -> str:
        [package] = (self.root / "packages").glob(pattern)
        return self.run(*DPKG, "--install", f"/packages/{package.name}", network=False, status=status)

    def configure(self) -> None:
        """Other ports, for other tests run meanwhile; a next hop."""
        self.smtp, http = free_ports(2)
        text = self.config.read_text()
        for old, new in (
            ('#hostname = "relay.example.org"', 'hostname = "relay.test"'),
            ('address = "127.0.0.1:2525"', f'address = "127.0.0.1:{self.smtp}"'),
            ('address = "127.0.0.1:8025"', f'address = "127.0.0.1:{http}"'),
            ('#next_hop = "smtp.example.com:587"', f'next_hop = "127.0.0.1:{self._next_hop}"'),
            ('#tls = "verify"', 'tls = "none"'),
        ):
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        self.config.write_text(text)

    @contextlib.contextmanager
    def relay(self) -> Iterator[None]:
        """What the unit starts, as its user."""
        unit = (self.root / "usr/lib/systemd/system/zonerelay.service").read_text()
        [start] = (line.partition("=")[2] for line in unit.splitlines() if line.startswith("ExecStart="))
        log = self.root / "tmp/relay.log"
        with log.open("ab") as stream:
            process = subprocess.Popen(self.line(*shlex.split(start), user="zonerelay"), stderr=stream)
        try:
            wait_until(lambda: process.poll() is not None or greets(self.smtp), timeout=60)
            assert process.poll() is None, log.read_text()
            yield
        finally:
            process.terminate()
            assert process.wait(60) == 0, log.read_text()

    def queue(self) -> list[str]:
        rows = self.run("zonerelay", "queue", "list", "--json").splitlines()
        return sorted(json.loads(row)["message_id"] for row in rows)


def build(target: Path) -> None:
    """What `make deb` does, without compression; the next version is the same with another number."""
    line = [str(ROOT / "debian/build"), str(target)]
    done = subprocess.run(
        line, env={**os.environ, **QUICK}, capture_output=True, text=True, timeout=BUILD_TIMEOUT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [package] = target.glob("zonerelay_*.deb")
    unpacked = target / "unpacked"
    subprocess.run(["dpkg-deb", "--raw-extract", package, unpacked], timeout=60, check=True)
    control = unpacked / "DEBIAN/control"
    control.write_text(control.read_text().replace("\nVersion: ", "\nVersion: 9"))
    [code] = unpacked.glob("usr/lib/zonerelay/lib/*/site-packages/zonerelay/__init__.py")
    code.write_text(code.read_text().replace('__version__ = "', '__version__ = "9'))
    compileall = ["-m", "compileall", "-q", "-f", "--invalidation-mode", "unchecked-hash"]
    subprocess.run(
        ["/usr/bin/python3", *compileall, "-s", str(unpacked), "-p", "/", str(code)], timeout=60, check=True
    )
    _pack(unpacked, target / "newer.deb")
    other = target / "other"
    (other / "DEBIAN").mkdir(parents=True)
    (other / "DEBIAN/control").write_text(
        "Package: other-mta\nVersion: 1\nArchitecture: all\nMaintainer: x <x@x.example>\n"
        "Provides: mail-transport-agent\nConflicts: mail-transport-agent\nDescription: an MTA that is there\n"
    )
    _pack(other, target / "other.deb")


def _pack(root: Path, package: Path) -> None:
    line = ["dpkg-deb", "--root-owner-group", "-Znone", "--build", str(root), str(package)]
    subprocess.run(line, timeout=60, check=True, capture_output=True)
    shutil.rmtree(root)


def test_mail_outlasts_an_upgrade_and_a_purge_until_it_is_delivered(tmp_path: Path) -> None:
    [port] = free_ports(1)
    packages = tmp_path / "packages"
    build(packages)
    machine = Machine(tmp_path / "root", packages, port)
    _from_installation_to_purge(machine)
    with Sink(port=port) as sink:
        _deliver(machine)
        sink.until(3)
    recipients = sorted(each.recipients for each in sink.messages)
    assert recipients == [("ann@d.example",), ("bob@d.example",), ("cat@d.example",)]
    _purge_for_good(machine)


def _from_installation_to_purge(machine: Machine) -> None:
    machine.install("other.deb")
    machine.install("zonerelay_*")
    assert "ok" in machine.run("zonerelay", "check-config", user="zonerelay")
    drop = machine.root / "var/spool/zonerelay"
    assert drop.is_dir(), "the unit makes writable what is there when the relay starts"
    _look_at_manual_and_completion(machine)
    machine.configure()
    with machine.relay():
        with smtplib.SMTP(LOOPBACK, machine.smtp, timeout=10) as client:
            assert client.sendmail("app@b.example", ["cat@d.example"], b"Subject: x\r\n\r\nx\r\n") == {}
        assert "conflict" in machine.install("zonerelay-sendmail_*", status=1)
        machine.run("dpkg", "--purge", "other-mta")
        machine.install("zonerelay-sendmail_*")
        assert machine.run("sendmail", "-t", user="nobody", stdin=LETTER) == ""
        queued = machine.queue()
        assert queued[0] in machine.run("mailq")
    # The relay is down: a message waits for it in the drop directory.
    assert machine.run("sendmail", "bob@d.example", user="nobody", stdin=LETTER) == ""

    edited = machine.config.read_text()
    machine.install("newer.deb")
    assert machine.config.read_text() == edited
    assert machine.run("zonerelay", "version").startswith("zonerelay 9")
    with machine.relay():
        assert wait_until(lambda: len(machine.queue()) == 3, timeout=60)
        before, queued = queued, machine.queue()
        assert set(before) < set(queued)

    machine.run(*DPKG, "--purge", "zonerelay-sendmail")
    assert list(drop.iterdir()) == []
    told = machine.run(*DPKG, "--purge", "zonerelay")
    assert "/var/lib/zonerelay is kept: its spool holds mail" in told
    assert not machine.config.exists()
    machine.install("newer.deb")
    machine.configure()
    with machine.relay():
        assert machine.queue() == queued


# What bash does at a tab behind `zonerelay queue h`.
TAB = """
. /usr/share/bash-completion/completions/zonerelay
COMP_WORDS=(zonerelay queue h) COMP_CWORD=2
$(complete -p zonerelay | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
echo "${COMPREPLY[@]}"
"""


def _look_at_manual_and_completion(machine: Machine) -> None:
    page = machine.run("gzip", "-dc", "/usr/share/man/man1/zonerelay-queue.1.gz")
    assert ".SH HOLD\n" in page
    assert "\\-\\-older\\-than AGE\nAccepted longer ago" in page
    commands = machine.run("gzip", "-dc", "/usr/share/man/man1/zonerelay.1.gz")
    for name in re.findall(r"^\.BR (\S+) \(1\)$", commands.replace("\\-", "-"), re.MULTILINE):
        assert (machine.root / f"usr/share/man/man1/{name}.1.gz").is_file()
    assert machine.run("bash", "-c", TAB) == "hold\n"
    for place in ("zsh/vendor-completions/_zonerelay", "fish/vendor_completions.d/zonerelay.fish"):
        assert "older-than" in (machine.root / "usr/share" / place).read_text()
    assert (machine.root / "usr/share/zonerelay/monitoring/alerts.yml").is_file()
    pages = machine.root / "usr/share/doc/zonerelay"
    for text in pages.glob("docs/**/*.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", text.read_text()):
            aim = Path(os.path.normpath(text.parent / target))
            assert aim.exists() or aim in {pages / each for each in NOT_INSTALLED}, f"{text}: {target}"


def _deliver(machine: Machine) -> None:
    with machine.relay():
        machine.run("zonerelay", "queue", "retry", "--all", "--yes")
        assert wait_until(lambda: machine.queue() == [], timeout=20)


def _purge_for_good(machine: Machine) -> None:
    [postrm] = (machine.root / "var/lib/dpkg/info").glob("zonerelay.postrm")
    shutil.copy(postrm, machine.root / "tmp/postrm")
    assert "kept" not in machine.run(*DPKG, "--purge", "zonerelay")
    left = machine.run("find", "/", "-xdev", "-name", "*zonerelay*", "-not", "-path", "/p*").split()
    assert [path for path in left if not path.startswith(("/packages", "/proc"))] == []

    (machine.state / "spool").mkdir(parents=True)
    machine.run("env", "ZONERELAY_PURGE_SPOOL=yes", "sh", "/tmp/postrm", "purge")
    assert not machine.state.exists()
