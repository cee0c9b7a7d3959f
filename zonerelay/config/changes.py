"""What of a new configuration a running relay cannot take up without a restart. Pure."""

from __future__ import annotations

from zonerelay.config.models import Settings

RESTART = ("hostname", "workers", "spool", "redis", "postgres", "delivery", "dns", "log", "admin")
"""What sockets, threads and files were opened with. Everything else changes live."""


def needs_restart(old: Settings, new: Settings) -> tuple[str, ...]:
    """Names of the top-level keys that differ and take effect at the next start only."""
    return tuple(name for name in RESTART if getattr(old, name) != getattr(new, name))
