"""Says which changes of the configuration a running relay cannot take up without a restart. Pure."""

from __future__ import annotations

from dataclasses import replace

from zonerelay.config.settings import Settings

RESTART = (
    "hostname", "workers", "spool", "redis", "postgres", "s3", "outbox", "capture", "sendmail", "delivery",
    "dns", "log", "history", "admin",
)  # fmt: skip
"""What sockets, threads and files were opened with. Everything else changes live."""
NEXT_START = ("spool", "admin", "log")
"""Of these, what stays as it was although workers are replaced: the supervisor's own, and where mail is."""


def needs_restart(old: Settings, new: Settings) -> tuple[str, ...]:
    """Names of the top-level keys that differ and take effect at the next start only."""
    return tuple(name for name in RESTART if getattr(old, name) != getattr(new, name))


def kept_from(old: Settings, new: Settings) -> Settings:
    """Returns the settings of a new worker in a relay that was started with the old settings."""
    return replace(new, **{name: getattr(old, name) for name in NEXT_START})


def taken_up(old: Settings, new: Settings) -> Settings:
    """Returns the settings of a relay that ran with the old settings, after a reload."""
    return replace(new, **{name: getattr(old, name) for name in RESTART})
