"""Defines metrics as values, which workers send to their supervisor and the control socket answers with. It
does not import prometheus-client, which would slow every command down.
"""

from __future__ import annotations

import msgspec

Labels = tuple[tuple[str, str], ...]


class Family(msgspec.Struct, frozen=True, array_like=True):
    """A Prometheus metric family. `samples` are names, labels and numbers in the order in which they are
    exported.
    """

    name: str
    kind: str
    help: str
    samples: tuple[tuple[str, Labels, float], ...]
