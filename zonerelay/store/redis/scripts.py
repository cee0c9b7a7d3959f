"""The Lua scripts of the Redis store: every decision about the queue is made inside one of them.

A script runs alone and whole, so what it has looked at cannot change before it writes; the server's own
clock decides about leases. They are loaded on each new connection and called by their SHA-1; `lua/` holds
their text, each with its arguments on its first line. `KEYS[1]` is the prefix of all keys; put in braces
(`{relay}:`) it keeps a queue in one slot of a cluster.

Versions may be mixed while a fleet is upgraded one by one: each calls its own scripts, over the same keys.
`format` says which version of these keys is stored, and the oldest that can work with them (`2 1`). A version
that adds keys, or members of a record, that older scripts do no harm to by not knowing them, says that older
one; any other change raises both, and is only made when no relay is alive (`enter.lua`).

The keys, behind the prefix; ZONE, DOMAIN and RCPT are percent-encoded:

    message:ID          hash: `#` created, `*` metadata (JSON), `^` whose upload it is, 1, 2, … body chunks.
                        Without `#` it does not exist yet, and Redis itself forgets it after a while
    deliveries:ID       hash: `ZONE RCPT` → `DUE CREATED DOMAIN JSON`; DUE is 0 (at once), a time or h (held)
    queue:ZONE          sorted set, in lexical order: `ID RCPT` of every delivery
    ready:ZONE          … of those that are due at once and that no relay has claimed
    retry:ZONE          … of those that wait, scored by their time, and that no relay has claimed
    parked:ZONE:DOMAIN  … of those that a claim passed over; parked:ZONE is the set of such domains
    claims              sorted set: `ZONE ID RCPT`, scored by the fencing token of the lease they hang on
    leases              sorted set: token, scored by when it ends (server's milliseconds); fence is the last
    numbers             hash: number of a relay (part of its message ids) → token
    counts              hash: `r ZONE`, `d ZONE`, `h ZONE`: ready, deferred and held deliveries
    once:IDENTITY       `ID DIGEST` of an idempotency key; Redis itself forgets it
    mark                by which relays know the queue again (common/queue_mark.py)
    last-id, format, probe      as their names say;  news: the channel that tells of mail in a zone
"""

from __future__ import annotations

import hashlib
from importlib import resources

NAMES = (
    "abort", "beat", "chunks", "claim", "claim_domain", "commit", "enter", "keep", "leave", "oldest",
    "page", "probe", "reap", "release", "rights", "settle", "update",
    # of the operator's commands
    "look", "mend", "strays", "sums",
)  # fmt: skip
# New mail needs memory; what lets mail leave must work without any.
_NEEDS_MEMORY = {"chunks", "commit"}
_READS = {"page", "oldest", "look", "strays", "sums"}


def _source(name: str) -> str:
    texts = resources.files("zonerelay.store.redis") / "lua"
    flags = "" if name in _NEEDS_MEMORY else " flags=no-writes" if name in _READS else " flags=allow-oom"
    parts = (texts / f"{part}.lua" for part in ("library", name))
    return f"#!lua{flags}\n" + "\n".join(part.read_text("utf-8") for part in parts)


SOURCES = {name: _source(name) for name in NAMES}
DIGESTS = {
    name: hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest() for name, source in SOURCES.items()
}
