"""Debian packages without installing them: downloaded and unpacked into a private directory.

Only `apt-get download` and `dpkg-deb -x` are used, so nothing of the system's package state is touched, and
any user may do it; where the system has no lists of packages yet, private ones are fetched. Everything is in
`.cache/` of the repository, which git ignores. Servers that root starts and that become another user must be
able to enter it: below a directory that is root's alone (a clone in /root) it is /var/cache/zonerelay-tests.
Shared libraries that the machine lacks come the same way, from the package's own dependencies. Every failure
is a DebianError whose text says what to do.
"""

import functools
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tests.support.locks import locked

REPOSITORY = Path(__file__).resolve().parents[2]
COMMAND_TIMEOUT = 300.0
MAX_PACKAGES = 100


def _cache() -> Path:
    ways = [REPOSITORY, *REPOSITORY.parents]
    if os.geteuid() != 0 or all(folder.stat().st_mode & 0o001 for folder in ways):
        return REPOSITORY / ".cache"
    return Path("/var/cache/zonerelay-tests")


CACHE = _cache()

_APT = ("-q", "-o", "APT::Sandbox::User=root")
"""apt's own sandbox user may not write into the cache; as root it warns about that on every call."""
_LISTS = CACHE / "apt" / "lists"
_PRIVATE = ("-o", f"Dir::State::Lists={_LISTS}", "-o", f"Dir::Cache={_LISTS.parent}")
LISTS_LAST = 3600.0

Say = Callable[[str], None]


class DebianError(Exception):
    """A package could not be had privately; the text tells a person why and what helps."""


class UnpackedPackage:
    """One Debian package and the libraries it needs, below `.cache/<name>`; `also` share its root."""

    def __init__(
        self, name: str, *, also: Sequence[str] = (), cache: Path = CACHE, say: Say = lambda _: None
    ) -> None:
        self.name = name
        self._names = (name, *also)
        self.home = cache / name
        self.root = self.home / "root"
        self._debs = self.home / "debs"
        self._say = say

    def ensure(self, programs: Sequence[str]) -> None:
        """Makes programs (paths in the packages, or patterns) runnable; downloads only what is missing."""
        with locked(self.home):
            if not self._runnable(programs):
                self._say(f"{self.name}: apt-get download into {_shown(self.home)} (nothing is installed)")
                self._fetch(self._names)
                self._fetch_libraries(programs)
        if lacking := [program for program in programs if not self.path(program).exists()]:
            raise DebianError(f"{', '.join(lacking)}: in none of {', '.join(self._names)}")
        if missing := missing_libraries(self._paths(programs), self.library_path()):
            raise DebianError(f"{self.name} needs shared libraries this machine lacks: {sorted(missing)}")

    @property
    def version(self) -> str:
        """The version of the package. Call after `ensure`."""
        return self._deb(self.name).name.split("_")[1]

    def path(self, program: str) -> Path:
        """Where it is; of several files that match a pattern the first, of none the pattern itself."""
        return next(iter(sorted(self.root.glob(program))), self.root / program)

    def library_path(self) -> str:
        """LD_LIBRARY_PATH: the private libraries, which shadow no system library unless unpacked here."""
        folders = {library.parent for library in self.root.glob("**/*.so*")}
        return os.pathsep.join(sorted(str(folder) for folder in folders))

    def _paths(self, programs: Iterable[str]) -> list[Path]:
        return [self.path(program) for program in programs]

    def _runnable(self, programs: Sequence[str]) -> bool:
        paths = self._paths(programs)
        return all(path.exists() for path in paths) and not missing_libraries(paths, self.library_path())

    def _fetch_libraries(self, programs: Sequence[str]) -> None:
        """Dependencies level by level, only as long as the dynamic linker still misses something."""
        level, seen = list(self._names), set(self._names)
        while missing_libraries(self._paths(programs), self.library_path()) and level:
            wanted = [name for parent in level for name in self._library_packages(parent)]
            level = [name for name in dict.fromkeys(wanted) if name not in seen]
            seen.update(level)
            if len(seen) > MAX_PACKAGES:
                raise DebianError(f"{self.name}: more than {MAX_PACKAGES} packages of libraries; giving up")
            self._say(f"{self.name}: also its libraries {', '.join(level)}")
            self._fetch(level)

    def _library_packages(self, name: str) -> list[str]:
        fields = [
            _run(["dpkg-deb", "-f", str(self._deb(name)), field]) for field in ("Pre-Depends", "Depends")
        ]
        return parse_depends(",".join(fields))

    def _fetch(self, names: Sequence[str]) -> None:
        if not names:
            return
        for tool in ("apt-get", "dpkg-deb"):
            if shutil.which(tool) is None:
                raise DebianError(
                    f"no {tool} here: the comparison needs Debian or a derivative to get {self.name}"
                )
        self._debs.mkdir(parents=True, exist_ok=True)
        _apt("apt-get", "download", *names, cwd=self._debs)
        for name in names:
            _run(["dpkg-deb", "-x", str(self._deb(name)), str(self.root)])

    def _deb(self, name: str) -> Path:
        found = sorted(self._debs.glob(f"{name}_*.deb"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise DebianError(f"apt-get download {name} succeeded but left no {name}_*.deb")
        return found[-1]


@functools.cache
def ready_package(name: str, *programs: str, also: tuple[str, ...] = ()) -> UnpackedPackage:
    """The package, with these programs ready to run."""
    package = UnpackedPackage(name, also=also)
    package.ensure(programs)
    return package


def _apt(program: str, *words: str, cwd: Path | None = None) -> str:
    """With the system's lists of packages; if they are missing or stale, with lists of our own."""
    for attempt in (1, 2):
        try:
            return _run([program, *_APT, *(_PRIVATE if _LISTS.exists() else ()), *words], cwd=cwd)
        except DebianError:
            if attempt == 2 or shutil.which("apt-get") is None:
                raise
            _update()
    raise AssertionError


def _update() -> None:
    """Fetches private lists, which any user may do."""
    with locked(_LISTS.parent):
        if not _LISTS.exists() or time.time() - _LISTS.stat().st_mtime > LISTS_LAST:
            new = _LISTS.with_name("new")
            for folder in (_LISTS, new):
                shutil.rmtree(folder, ignore_errors=True)
            (new / "partial").mkdir(parents=True)
            _run(["apt-get", *_APT, *_PRIVATE, "-o", f"Dir::State::Lists={new}", "update"])
            new.rename(_LISTS)
            os.utime(_LISTS)


def parse_depends(control: str) -> list[str]:
    """The shared-library packages of a Depends field, first alternative only, libc left out."""
    names = []
    for clause in control.replace("\n", " ").split(","):
        name = re.split(r"[\s(|:]", clause.strip(), maxsplit=1)[0]
        if name.startswith("lib") and not name.startswith("libc6"):
            names.append(name)
    return names


def parse_ldd(output: str) -> set[str]:
    """The sonames that ldd could not find."""
    return {
        line.split("=>")[0].strip() for line in output.splitlines() if line.rstrip().endswith("not found")
    }


def missing_libraries(programs: Iterable[Path], library_path: str) -> set[str]:
    missing: set[str] = set()
    for program in programs:
        if program.exists() and _is_binary(program):
            missing |= parse_ldd(_run(["ldd", str(program)], env={"LD_LIBRARY_PATH": library_path}))
    return missing


def loader(program: Path, library_path: str) -> Path:
    """The dynamic linker that a program asks for."""
    output = _run(["ldd", str(program)], env={"LD_LIBRARY_PATH": library_path})
    found = re.search(r"^\s*(/\S+) \(0x", output, re.MULTILINE)
    if found is None:
        raise DebianError(f"no dynamic linker for {program.name} in:\n{output}")
    return Path(found[1])


def providers(name: str, pattern: str) -> list[str]:
    """What a package depends on, if its name matches: which PHP `php-cli` is, here."""
    output = _apt("apt-cache", "depends", "--important", name)
    names = [line.partition(":")[2].strip() for line in output.splitlines()]
    return [each for each in names if re.fullmatch(pattern, each)]


def _is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _run(command: Sequence[str], *, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    environment = {**os.environ, "LC_ALL": "C", **(env or {})}
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        hint = " (stale package lists? try: apt-get update)" if command[0] == "apt-get" else ""
        raise DebianError(f"{' '.join(command[:6])} failed{hint}:\n{error.stderr.strip()}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DebianError(f"{command[0]} could not be run: {error}") from error
    return done.stdout


def _shown(path: Path) -> str:
    return str(path.relative_to(REPOSITORY)) if path.is_relative_to(REPOSITORY) else str(path)
