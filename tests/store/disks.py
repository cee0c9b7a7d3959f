"""Small file systems for one process: mounted in its own mount namespace, gone when it dies."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUSER = 0x10000000
_MS_REC_PRIVATE = (1 << 14) | (1 << 18)


def _enter_namespace() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    flags = _CLONE_NEWNS if user == 0 else _CLONE_NEWNS | _CLONE_NEWUSER
    if libc.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    if libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None) != 0:
        raise OSError(ctypes.get_errno(), "mount --make-rprivate")


def mount_tmpfs(directory: Path, size: int) -> None:
    """An ordinary user may do this where user namespaces are allowed."""
    _enter_namespace()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", directory], check=True)


def mount_image(directory: Path, image: Path) -> None:
    """Needs root and loop devices. Nothing reaches the image before somebody syncs: the journal waits."""
    _enter_namespace()
    subprocess.run(["mount", "-o", "loop,commit=600,noatime", image, directory], check=True)


def make_image(image: Path, size: int) -> None:
    with image.open("wb") as file:
        file.truncate(size)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True, capture_output=True)
