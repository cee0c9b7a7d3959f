"""Password hashes: argon2id in the PHC string format. Only this module imports argon2-cffi.

The parameters, 19 MiB, two passes and a parallelism of one, are OWASP's minimum for argon2id. A hash takes 20
to 40 ms here, which makes searching a stolen file expensive, and two threads that check passwords use at most
38 MiB. Hashes with other parameters are accepted within bounds, because a line in a file must not exhaust the
machine's memory.

`matches` blocks while the hash is computed and releases the GIL: call it in a thread. The library is loaded
for the first password, because most relays identify their clients by address.
"""

import binascii
import re
from collections import Counter
from collections.abc import Iterable

MEMORY = 19 * 1024
"""In KiB."""

PASSES = 2
LANES = 1
OURS = rf"\$argon2id\$v=19\$m={MEMORY},t={PASSES},p={LANES}"
"""The pattern at the beginning of our own hashes. Salt and digest have 22 and 43 characters."""

MAX_MEMORY = 256 * 1024
MAX_PASSES = 20
MAX_LANES = 16
_SALT_OCTETS = range(8, 65)
_HASH_OCTETS = range(16, 65)

_PHC = re.compile(
    r"\$argon2id\$v=19\$m=(\d{1,7}),t=(\d{1,3}),p=(\d{1,3})\$([A-Za-z0-9+/]+)\$([A-Za-z0-9+/]+)", re.ASCII
)


def make_hash(password: str) -> str:
    """Return the hash of a password with a new salt, so that equal passwords have different hashes."""
    from argon2 import PasswordHasher  # noqa: PLC0415

    return PasswordHasher(time_cost=PASSES, memory_cost=MEMORY, parallelism=LANES).hash(password)


def matches(hashed: str, password: str) -> bool:
    """Return whether the password matches the hash. Raise argon2's VerificationError if the check fails, as
    for lack of memory.
    """
    from argon2.exceptions import VerifyMismatchError  # noqa: PLC0415
    from argon2.low_level import Type, verify_secret  # noqa: PLC0415

    try:
        return verify_secret(hashed.encode("ascii"), password.encode(), Type.ID)
    except VerifyMismatchError:
        return False


def check_hash(text: str) -> None:
    """Raise ValueError with an explanation if the hash is invalid. The text never contains the hash."""
    found = _PHC.fullmatch(text)
    if found is None:
        raise ValueError("the hash is not an argon2id hash as written by zonerelay user")
    memory, passes, lanes = (int(number) for number in found.groups()[:3])
    if not (8 * lanes <= memory <= MAX_MEMORY and 1 <= passes <= MAX_PASSES and 1 <= lanes <= MAX_LANES):
        most = f"the limits are {MAX_MEMORY}, {MAX_PASSES} and {MAX_LANES}"
        raise ValueError(f"the hash requires {memory} KiB, {passes} passes and {lanes} lanes; {most}")
    salt, digest = (_octets(part) for part in found.groups()[3:])
    if salt not in _SALT_OCTETS or digest not in _HASH_OCTETS:
        raise ValueError("the hash is damaged: the length of the salt or of the digest is invalid")


def nobodys_hash(hashes: Iterable[str]) -> str:
    """Return a hash that no password matches, with the most frequent cost parameters of these hashes."""
    ours = f"$argon2id$v=19$m={MEMORY},t={PASSES},p={LANES}"
    costs = Counter(hashed.rsplit("$", 2)[0] for hashed in hashes)
    cost = costs.most_common(1)[0][0] if costs else ours
    # A digest of zeros: finding a password for it takes 2^256 attempts.
    return f"{cost}${_base64(bytes(16))}${_base64(bytes(32))}"


def _octets(text: str) -> int:
    """Return the number of bytes that a text encodes in base64 without padding, or 0 if it is not base64."""
    try:
        return len(binascii.a2b_base64(text + "=" * (-len(text) % 4), strict_mode=True))
    except binascii.Error:
        return 0


def _base64(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode("ascii").rstrip("=")
