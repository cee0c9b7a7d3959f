"""Whether a server can keep what a 250 promises. One that cannot is refused, unless words of the operator's
accept it.
"""

from __future__ import annotations

from zonerelay.store.contract import StoreOpenError
from zonerelay.store.postgres import sql
from zonerelay.store.postgres.driver import Link

OLDEST_VERSION = 13


class UnsafeError(StoreOpenError):
    """The server would lose what it has acknowledged."""


async def check_server(link: Link, *, accepts_loss: bool) -> None:
    """Raises StoreOpenError. Cheap: settings may be changed behind our back, so each beat asks again."""
    ((version, standby, fsync, full_pages, commit),) = await link.fetch(sql.SERVER)
    if version < OLDEST_VERSION * 10_000:
        raise StoreOpenError(
            f"the database server is PostgreSQL {version // 10_000}; zonerelay needs {OLDEST_VERSION}"
        )
    if standby:
        raise StoreOpenError("the database server is a standby, which only reads: connect to the primary")
    wrong = [
        f"{name} = {value}"
        for name, value in (
            ("fsync", fsync),
            ("full_page_writes", full_pages),
            ("synchronous_commit", commit),
        )
        if value == "off"
    ]
    if wrong and not accepts_loss:
        raise UnsafeError(
            f"the database server has {' and '.join(wrong)}: it would lose mail that was acknowledged. Turn"
            " it on (docs/postgres.md), or say the words of [postgres] accept_loss"
        )
