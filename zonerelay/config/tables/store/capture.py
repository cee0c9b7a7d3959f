"""[capture]: mail that is captured instead of being sent."""

from __future__ import annotations

from dataclasses import dataclass

from zonerelay.config.endpoints import parse_listen
from zonerelay.config.options import forms
from zonerelay.config.options.options import DAY, HOUR, MB, YEAR, duration, size, text
from zonerelay.config.problems import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSettings:
    """[capture]"""

    keep: float = duration(7 * DAY, least=HOUR, most=10 * YEAR)
    """How long captured mail is kept: the mail of each [[zone]] with next_hop = "capture:". It is in the
    directory captured beside the spool (docs/sandbox.md).
    """
    max_size: int = size(500 * MB, least=MB)
    """Of all captured mail together. The oldest goes first. A message that is larger than this bounces."""
    release_to: str = text("", form=forms.listen, optional=True)
    """Where a captured message goes when an operator releases it, by SMTP: an address of this relay or of
    another ("127.0.0.1:25"). Empty: captured mail cannot be released.
    """


def check_capture(capture: CaptureSettings, report: Report) -> None:
    path = ("capture", "release_to")
    if capture.release_to and report.sound(*path) and parse_listen(capture.release_to).is_unix:
        report.refuse(path, 'is reached over TCP: write an address such as "127.0.0.1:25"')
