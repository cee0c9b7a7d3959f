"""`python -S holder.py COUNT`: holds so many network namespaces until its standard input ends.

It says the process ids that hold them, one line, and then waits. When whoever started it has gone, however
that came, it ends every process that is still in one of them; the namespaces, and with them their interfaces,
go with the last process. So nothing is left behind, not even by a test run that was killed.
"""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

CLONE_NEWNET = 0x40000000


def become_namespace() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "a network namespace cannot be made (are we root?)")


def hold(reading: int, writing: int) -> int:
    """A child in a namespace of its own, as soon as it is there; it waits for a signal."""
    child = os.fork()
    if child == 0:
        try:
            become_namespace()
            os.write(writing, b".")
            signal.pause()
        finally:
            os._exit(1)
    if os.read(reading, 1) != b".":
        raise OSError("a network namespace was not made")
    return child


def namespace(process: str | int) -> str:
    """Which namespace a process is in; nothing for one that has gone."""
    try:
        return str(Path(f"/proc/{process}/ns/net").readlink())
    except OSError:
        return ""


def end_all(ours: set[str], spare: set[int]) -> None:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in spare and namespace(entry.name) in ours:
            with contextlib.suppress(OSError):
                os.kill(int(entry.name), signal.SIGKILL)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: whoever started us decides
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    starter = os.getppid()
    holders = [hold(*os.pipe()) for _ in range(int(sys.argv[1]))]
    ours = {namespace(holder) for holder in holders} - {namespace("self"), ""}
    print(*holders, flush=True)
    sys.stdin.buffer.read()
    end_all(ours, {os.getpid(), starter})


if __name__ == "__main__":
    main()
