"""Signatures of Standard Webhooks: HMAC-SHA256 with `whsec_` secrets, ed25519 with `whsk_` secrets. Pure.

What is signed is the event's id, the time of the attempt in seconds, and the body, with dots between. No text
or repr contains an octet of a key.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Sequence


def signatures(keys: Sequence[str], event_id: str, timestamp: int, body: bytes) -> str:
    """The header `webhook-signature`: a signature with each key, the newest first."""
    signed = b"%s.%d.%s" % (event_id.encode(), timestamp, body)
    return " ".join(_sign(key, signed) for key in keys)


def _sign(key: str, signed: bytes) -> str:
    kind, _, encoded = key.partition("_")
    octets = base64.b64decode(encoded + "=" * (-len(encoded) % 4))
    if kind == "whsk":
        # A relay that signs nothing with ed25519 does without the library.
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415

        signature = Ed25519PrivateKey.from_private_bytes(octets).sign(signed)
        return f"v1a,{base64.b64encode(signature).decode()}"
    return f"v1,{base64.b64encode(hmac.digest(octets, signed, hashlib.sha256)).decode()}"
