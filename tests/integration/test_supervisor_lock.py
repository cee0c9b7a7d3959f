"""One relay for one spool: who comes second is told whose it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zonerelay.process.setup import StartError
from zonerelay.supervisor import lock

_HOLDS = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print(flush=True)
sys.stdin.read()
"""


def nothing(_: object) -> None:
    pass


def test_who_has_the_spool_is_named_to_the_second(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-c", _HOLDS, str(tmp_path / lock.LOCK_NAME)]
    waits: list[str] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(StartError, match=rf"another relay.*is locked by process {holder.pid}\. Stop it"):
            lock.take(tmp_path, patience=0.0, waiting=waits.append, refuse=nothing)
        assert waits == [str(holder.pid)]
        holder.communicate()
    os.close(lock.take(tmp_path, patience=0.0, waiting=nothing, refuse=nothing))


def test_who_waits_for_the_spool_hears_when_there_is_nothing_to_wait_for(tmp_path: Path) -> None:
    held = lock.take(tmp_path, patience=0.0, waiting=nothing, refuse=nothing)
    asked: list[bool] = []

    def refuse(held: bool) -> None:
        asked.append(held)
        if asked == [True, True]:
            raise StartError("another relay answers")

    with pytest.raises(StartError, match="answers"):
        lock.take(tmp_path, patience=20.0, waiting=nothing, refuse=refuse)
    os.close(held)
