"""A disk whose power can be cut: an ext4 image of which nothing but what was synced survives."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.disks import make_image

needs_a_disk = pytest.mark.skipif(
    not (os.getuid() == 0 and Path("/dev/loop-control").exists() and shutil.which("mkfs.ext4")),
    reason="a disk that is cut off needs root, loop devices and mkfs.ext4",
)
_SIZE = 64 * 1024 * 1024


class Disk:
    """`place` is where it is mounted."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._image = directory / "image"
        self.place = directory / "disk"

    @contextlib.contextmanager
    def plugged_in(self) -> Iterator[Disk]:
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
