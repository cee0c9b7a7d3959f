"""Where zonerelay's CPU goes: py-spy during one more repetition of a row.

Writes a speedscope file (open it at https://www.speedscope.app or with any viewer of that format) and
a short table of the functions with the most samples. Only threads that hold the GIL are sampled: a
thread that waits for it, for the disk or for work looks busy to the kernel and would top the table. The
store's own work outside the GIL is therefore missing. Sampling pauses the process, so the repetition's
times are not used.
"""

import contextlib
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

PY_SPY = Path(sys.executable).with_name("py-spy")
RATE = 400
STOP_TIMEOUT = 60.0


@contextlib.contextmanager
def profiled(pid: int, output: Path) -> Iterator[None]:
    command = [str(PY_SPY), "record", "--pid", str(pid), "--rate", str(RATE), "--gil"]
    command += ["--format", "speedscope", "--output", str(output)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(STOP_TIMEOUT)


def top_functions(path: Path, *, limit: int = 25) -> list[tuple[str, float, float]]:
    """(function, share of samples in itself, share in it and below), by own share."""
    # Any: speedscope's own format, of which only frames and samples are read.
    document: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    return rank(document, limit=limit)


def rank(document: dict[str, Any], *, limit: int) -> list[tuple[str, float, float]]:
    frames = [f"{frame['name']} ({Path(frame['file']).name})" for frame in document["shared"]["frames"]]
    own: Counter[str] = Counter()
    below: Counter[str] = Counter()
    total = 0.0
    for profile in document["profiles"]:
        for stack, weight in zip(profile["samples"], profile["weights"], strict=True):
            total += weight
            names = [frames[index] for index in stack]
            if names:
                own[names[-1]] += weight
            below.update(dict.fromkeys(names, weight))
    return (
        [(name, share / total, below[name] / total) for name, share in own.most_common(limit)]
        if total
        else []
    )
