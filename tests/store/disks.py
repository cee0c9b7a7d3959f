"""Small file systems for one process: mounted in its own mount namespace, gone when it dies."""

import subprocess
from pathlib import Path

from tests.support.mounts import enter_mount_namespace


def mount_tmpfs(directory: Path, size: int, *, files: int = 0) -> None:
    """An ordinary user may do this where user namespaces are allowed. `files`: it has so many inodes."""
    enter_mount_namespace()
    options = f"size={size},nr_inodes={files}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", directory], check=True)


def mount_image(directory: Path, image: Path) -> None:
    """Needs root and loop devices. Nothing reaches the image before somebody syncs: the journal waits."""
    enter_mount_namespace()
    subprocess.run(["mount", "-o", "loop,commit=600,noatime", image, directory], check=True)


def make_image(image: Path, size: int) -> None:
    with image.open("wb") as file:
        file.truncate(size)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True, capture_output=True)
