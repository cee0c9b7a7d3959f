"""A mount namespace of this process's own: what is mounted in it, no other process sees, and it goes with it.

As a program (`python mounts.py COMMAND…`) it runs a command there. It imports nothing of the project.
"""

import ctypes
import os
import sys
import tempfile
from pathlib import Path

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUSER = 0x10000000
_MS_REC_PRIVATE = (1 << 14) | (1 << 18)


def enter_mount_namespace() -> None:
    """An ordinary user may do this where user namespaces are allowed; raises OSError elsewhere."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    flags = _CLONE_NEWNS if user == 0 else _CLONE_NEWNS | _CLONE_NEWUSER
    if libc.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    if user == 0:
        _make_private_above(libc)
    else:
        _make_private(libc)


def _make_private(libc: ctypes.CDLL) -> None:
    """Without it what is mounted here would show in the namespace that this one was copied from."""
    if libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None) != 0:
        raise OSError(ctypes.get_errno(), "mount --make-rprivate")


def _make_private_above(libc: ctypes.CDLL) -> None:
    """In a chroot / may be no mount point. Propagation is a property of mounts, so it is changed from the
    root of the namespace: a process whose working directory is outside its root can walk up to it.
    """
    here, root = os.open(".", os.O_PATH), os.open("/", os.O_PATH)
    with tempfile.TemporaryDirectory() as inner:
        os.chroot(inner)
        os.fchdir(root)
        while not Path().samefile(".."):
            os.chdir("..")
        os.chroot(".")
        _make_private(libc)
        os.fchdir(root)
        os.chroot(".")
        os.fchdir(here)
    os.close(here)
    os.close(root)


if __name__ == "__main__":
    enter_mount_namespace()
    os.execvp(sys.argv[1], sys.argv[1:])
