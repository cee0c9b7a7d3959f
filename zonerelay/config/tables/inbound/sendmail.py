"""[sendmail]: the files of sendmail(1) on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zonerelay.config.options.options import path

# As in `zonerelay/sendmail.py`, which a test compares: a relay loads that with the first mail of sendmail(1).
DROP, ALIASES = "/var/spool/zonerelay", "/etc/aliases"


@dataclass(frozen=True, slots=True, kw_only=True)
class SendmailSettings:
    """[sendmail]"""

    drop: Path = path(Path(DROP))
    """Where sendmail leaves a message while the relay does not answer; the relay takes it from there when it
    runs. It has the directories tmp and new, owned by the relay's user, with mode 3733. Without them sendmail
    fails with status 75 instead.
    """
    aliases: Path = path(Path(ALIASES))
    """Addresses for the users of this machine, as in "root: admin@example.com". sendmail reads it, with each
    message."""
