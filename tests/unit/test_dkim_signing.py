"""Where signatures are made: slow ones in a thread where that is worth it, with the same result."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from tests.support.dkim import NOW, entry, keys_of, sign
from zonerelay.delivery.rewrite.rendering import DkimSigner
from zonerelay.message.dkim.signature import ED25519, RSA, DkimKey

HEADER = b"From: ann@example.com\r\n"


def watched(*files: str) -> tuple[tuple[DkimKey, ...], list[tuple[str, bool]]]:
    """Keys, and who signed with them: the algorithm, and whether in this thread."""
    here, seen = threading.get_ident(), []

    def watch(key: DkimKey) -> DkimKey:
        def signs(digest: bytes) -> bytes:
            seen.append((key.algorithm, threading.get_ident() == here))
            return key.sign(digest)

        return replace(key, sign=signs)

    entries = (entry("example.com", f"s{at}", file) for at, file in enumerate(files))
    return tuple(map(watch, keys_of(*entries).for_author("example.com", NOW))), seen


BOTH = ("rsa.pem", "ed.pem")
WHERE = [
    ("RSA in a thread, Ed25519 here", True, BOTH, 20, [(ED25519, True), (RSA, False)]),
    ("a short RSA key here", True, ("weak.pem",), 2, [(RSA, True)]),
    ("a message that is alone here", True, BOTH, 1, [(ED25519, True), (RSA, True)]),
    ("everything here with one core", False, BOTH, 2, [(ED25519, True), (RSA, True)]),
]


@pytest.mark.parametrize(
    ("why", "beside", "files", "messages", "expected"), WHERE, ids=[case[0] for case in WHERE]
)
async def test_the_thread_is_for_what_is_slow(
    why: str, beside: bool, files: tuple[str, ...], messages: int, expected: list[tuple[str, bool]]
) -> None:
    keys, seen = watched(*files)
    headers = [HEADER + b"Subject: %d\r\n" % number for number in range(messages)]
    signing = DkimSigner(threaded=beside)
    try:
        found = await asyncio.gather(*(signing.sign(header, "", keys, now=NOW) for header in headers))
    finally:
        signing.close()
    assert sorted(set(seen)) == expected
    # Neither algorithm has anything random in it.
    assert found == [sign(header, "", keys, now=NOW) for header in headers]


@pytest.mark.parametrize("messages", [1, 2], ids=["here", "in the thread"])
async def test_a_key_that_fails_fails_for_who_asked(messages: int) -> None:
    def broken(digest: bytes) -> bytes:
        raise RuntimeError("no")

    right, _ = watched("rsa.pem")
    signing = DkimSigner(threaded=True)
    keys = [[DkimKey("a.b", "s", RSA, broken, slow=True)], right][:messages]
    try:
        found = await asyncio.gather(
            *(signing.sign(HEADER, "", each, now=NOW) for each in keys), return_exceptions=True
        )
    finally:
        signing.close()
    assert isinstance(found[0], RuntimeError)
    assert found[1:] == [sign(HEADER, "", right, now=NOW)][: messages - 1]


async def test_signatures_that_wait_at_the_end_are_cancelled() -> None:
    keys, seen = watched("rsa.pem")
    signing = DkimSigner(threaded=True)
    waits = asyncio.ensure_future(signing.sign(HEADER, "", keys, now=NOW))
    await asyncio.sleep(0)
    signing.close()
    with pytest.raises(asyncio.CancelledError):
        await waits
    assert not seen
