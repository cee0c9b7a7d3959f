"""The package's scripts run as root, and what the relay's user left for them is not theirs to believe."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

DEBIAN = Path(__file__).parents[2] / "debian"
USER = "nobody"
STUB = "#!/bin/sh\nexit 0\n"

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@dataclass
class Place:
    """A state directory of the relay's user, and a directory beside it that is not."""

    directory: Path

    def __post_init__(self) -> None:
        self.programs, self.state, self.victim = (
            self.directory / name for name in ("bin", "state", "victim")
        )
        for each in (self.programs, self.state, self.victim):
            each.mkdir()
        (self.victim / "file").write_text("not the relay's")
        shutil.chown(self.state, USER)
        self.program("deb-systemd-helper", STUB)
        self.program("deb-systemd-invoke", STUB)
        self.program("systemctl", STUB)

    def program(self, name: str, text: str) -> None:
        (self.programs / name).write_text(text)
        (self.programs / name).chmod(0o755)

    def run(self, script: str, *arguments: str) -> str:
        text = (DEBIAN / script).read_text()
        for old, new in (
            ("state=/var/lib/zonerelay\n", f"state={self.state}\n"),
            ("user=zonerelay\n", f"user={USER}\n"),
        ):
            assert old in text
            text = text.replace(old, new)
        text = text.replace("/var/spool/zonerelay", str(self.directory / "drop"))
        path = f"{self.programs}:{os.environ['PATH']}:/usr/sbin"
        ended = subprocess.run(
            ["/bin/sh", "-c", text, script, *arguments],
            env={"PATH": path},
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
            cwd="/",
        )
        return ended.stdout + ended.stderr

    def by_user(self, name: str) -> Path:
        made = self.state / name
        made.mkdir()
        (made / "data").write_text("x")
        for each in (made, made / "data"):
            shutil.chown(each, USER)
        return made


@pytest.fixture
def place() -> Iterator[Place]:
    # pytest's own directory is root's alone.
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield Place(Path(directory))


def test_a_purge_removes_what_was_proved_empty_and_what_lies_beside_it(place: Place) -> None:
    spool, other = place.by_user("spool"), place.by_user("spool-of-an-operator")
    place.by_user("history")
    (place.state / "empty-spool").write_text(f"{spool}\n")
    assert "is kept" in place.run("postrm", "purge")
    assert list(place.state.iterdir()) == [other]
    shutil.rmtree(other)
    (place.state / "empty-spool").write_text("")
    assert place.run("postrm", "purge") == ""
    assert not place.state.exists()


@pytest.mark.parametrize(
    "way", ["{state}/../victim", "{state}/link/", "{state}/link/file", "{state}/./../victim/file", "{victim}"]
)
def test_a_purge_removes_nothing_that_the_relays_user_could_not_remove(place: Place, way: str) -> None:
    (place.state / "link").symlink_to(place.victim)
    line = way.format(state=place.state, victim=place.victim)
    (place.state / "empty-spool").write_text(f"{line}\n")
    place.run("postrm", "purge")
    assert (place.victim / "file").exists()


def test_a_removal_writes_its_proof_as_the_relays_user(place: Place) -> None:
    place.program("zonerelay", f'#!/bin/sh\necho "{place.state}/spool"\n')
    proof = place.state / "empty-spool"
    proof.symlink_to(place.victim)
    place.run("prerm", "remove")
    assert proof.is_file()
    assert not proof.is_symlink()
    assert proof.owner() == USER
    assert [each.name for each in place.victim.iterdir()] == ["file"]
    # What is not proved leaves no proof from before, and stops no removal.
    place.program("zonerelay", "#!/bin/sh\nexit 1\n")
    place.run("prerm", "remove")
    assert list(place.state.iterdir()) == []
