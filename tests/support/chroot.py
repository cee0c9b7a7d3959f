"""A small Debian below a directory, of the machine's own release or another. Needs root.

debootstrap makes it once, in the cache; each chroot is a copy. Commands in it see its files and its own /proc
only, and may be cut off from every network. debootstrap and wget are fetched where the machine lacks them.
"""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support import mounts
from tests.support.debian import CACHE, ready_package
from tests.support.locks import locked

PACKAGES = ("python3", "s-nail", "cron", "php-cli", "git-email", "mutt")
"""Besides what every Debian has: the interpreter that packages may depend on, a mailx, and programs that call
sendmail. None of them brings an MTA.
"""
OWN_RELEASE = platform.freedesktop_os_release()["VERSION_CODENAME"]
_REGISTRIES = ("PIP_", "SSL_CERT_", "http_proxy", "https_proxy", "no_proxy")
"""Variables that tell how this machine reaches its package registries."""
_CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"
MAKE_TIMEOUT = 600.0
COMMAND_TIMEOUT = 300.0

_ENTER = 'mount -t proc proc "$0/proc"; exec chroot "$@"'


class Chroot:
    """A copy of the small Debian at `root`; it is gone with its directory."""

    def __init__(self, root: Path, release: str = OWN_RELEASE, packages: Sequence[str] = PACKAGES) -> None:
        self.root = root
        template = _template(release, packages)
        subprocess.run(["cp", "-a", "--reflink=auto", template, root], timeout=MAKE_TIMEOUT, check=True)

    def line(self, *command: str, user: str = "root", network: bool = True) -> list[str]:
        """The command line that runs a command in it."""
        userspec = f"--userspec={user}:"  # with the group of the user
        within = [sys.executable, mounts.__file__, "sh", "-c", _ENTER, str(self.root)]
        return [*([] if network else ["unshare", "--net"]), *within, userspec, str(self.root), *command]

    def run(
        self,
        *command: str,
        user: str = "root",
        network: bool = True,
        stdin: str = "",
        status: int = 0,
        timeout: float = COMMAND_TIMEOUT,
    ) -> str:
        """What it prints, errors included. A status that is not the expected one is an AssertionError."""
        done = subprocess.run(
            self.line(*command, user=user, network=network),
            input=stdin,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", **_registries()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == status, f"{command}: {done.returncode}\n{done.stdout}"
        return done.stdout


def _registries() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_REGISTRIES)}


def _template(release: str, packages: Sequence[str]) -> Path:
    template = CACHE / "chroot" / f"{release}-{'-'.join(packages)}"
    with locked(template.parent):
        if not template.exists():
            new = template.with_name(f"{template.name}.new")
            _debootstrap(release, packages, new)
            new.rename(template)
    return template


def _debootstrap(release: str, packages: Sequence[str], root: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
    environment, program = dict(os.environ), shutil.which("debootstrap")
    if program is None:
        package = ready_package("debootstrap", "usr/sbin/debootstrap")
        program = str(package.path("usr/sbin/debootstrap"))
        environment["DEBOOTSTRAP_DIR"] = str(package.root / "usr/share/debootstrap")
    if shutil.which("wget") is None:
        wget = ready_package("wget", "usr/bin/wget")
        environment["PATH"] += os.pathsep + str(wget.root / "usr/bin")
        environment["LD_LIBRARY_PATH"] = wget.library_path()
    _run([program, "--variant=minbase", f"--include={','.join(packages)}", release, str(root)], environment)
    for name in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale", "usr/share/man"):
        shutil.rmtree(root / name)
    if (own := Path("/", _CERTIFICATES)).exists():  # also those that the registries of this machine need
        (root / _CERTIFICATES).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(own, root / _CERTIFICATES)


def _run(command: Sequence[str], environment: dict[str, str]) -> None:
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=MAKE_TIMEOUT, check=False
    )
    assert done.returncode == 0, f"{command[0]}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}"
