"""Where signatures are made: slow ones in a thread where that is worth it, with the same result."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from tests.support.dkim import NOW, entry, keys_of
from zonerelay.delivery.rewrite.rendering import Signing
from zonerelay.message.dkim.signature import ED25519, RSA, DkimKey, sign

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


WHERE = [
    ("RSA in a thread, Ed25519 here", True, ("rsa.pem", "ed.pem"), [(RSA, False), (ED25519, True)]),
    ("a short RSA key here", True, ("weak.pem",), [(RSA, True)]),
    ("everything here with one core", False, ("rsa.pem", "ed.pem"), [(RSA, True), (ED25519, True)]),
]


@pytest.mark.parametrize(("why", "beside", "files", "expected"), WHERE, ids=[case[0] for case in WHERE])
async def test_the_thread_is_for_what_is_slow(
    why: str, beside: bool, files: tuple[str, ...], expected: list[tuple[str, bool]]
) -> None:
    keys, seen = watched(*files)
    signing = Signing(beside=beside)
    try:
        found = await signing.sign(HEADER, "", keys, now=NOW)
    finally:
        signing.close()
    assert seen == expected
    assert found == sign(HEADER, "", keys, now=NOW)  # neither algorithm has anything random in it


async def test_a_key_that_fails_in_the_thread_fails_for_who_asked() -> None:
    def broken(digest: bytes) -> bytes:
        raise RuntimeError("no")

    signing = Signing(beside=True)
    try:
        with pytest.raises(RuntimeError, match="no"):
            await signing.sign(HEADER, "", [DkimKey("a.b", "s", RSA, broken, slow=True)], now=NOW)
    finally:
        signing.close()
