"""A disk whose power can be cut: an ext4 image of which nothing but what was synced survives."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.store.disks import make_image
from tests.support.ports import wait_until

needs_a_disk = pytest.mark.skipif(
    not (os.getuid() == 0 and Path("/dev/loop-control").exists() and shutil.which("mkfs.ext4")),
    reason="a disk that is cut off needs root, loop devices and mkfs.ext4",
)
_SIZE = 64 * 1024 * 1024


def said_until_a_cut(
    command: Sequence[str],
    log: Path,
    seconds: float,
    image: Path,
    copy: Path,
    environment: Mapping[str, str] | None = None,
) -> list[str]:
    """Let a program work on a disk for so long after its first line, and return its whole lines until then.

    `copy` is what the disk has at that moment; the rest of it is gone.
    """
    with log.open("wb") as said:
        process = subprocess.Popen(command, stdout=said, env={**os.environ, **(environment or {})})
    try:
        wait_until(lambda: log.stat().st_size > 0, timeout=30, interval=0.005)
        time.sleep(seconds)
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.05)  # what the disk was asked to do before the cut, it may finish
        heard = whole_lines(log.read_bytes())
        shutil.copyfile(image, copy)
    finally:
        process.kill()
        process.wait()
    return heard


def whole_lines(raw: bytes) -> list[str]:
    """Return what was said completely."""
    return raw.decode().split("\n")[:-1]


class Disk:
    """`place` is where it is mounted."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._image = directory / "image"
        self.place = directory / "disk"

    @contextlib.contextmanager
    def plugged_in(self) -> "Iterator[Disk]":
        self._directory.mkdir()
        make_image(self._image, _SIZE)
        # The journal waits for a sync: nothing is written because time passes.
        with _mounted(self._image, self.place, "loop,commit=600,noatime"):
            yield self

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """What the disk has now, and nothing more, is at `place` within the block."""
        copy = self._directory / "copy"
        subprocess.run(["cp", "--sparse=always", self._image, copy], check=True)
        with _mounted(copy, self.place, "loop,noatime"):  # over the other one
            yield


@contextlib.contextmanager
def _mounted(image: Path, place: Path, options: str) -> Iterator[None]:
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "ext4", "-o", options, image, place], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", place], check=True)
