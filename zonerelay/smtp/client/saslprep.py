"""SASLprep (RFC 4013): user names and passwords in the form that SCRAM sends. ASCII stays unchanged."""

from __future__ import annotations

import stringprep
import unicodedata
from collections.abc import Callable

_FORBIDDEN: tuple[Callable[[str], bool], ...] = (
    stringprep.in_table_c12,
    stringprep.in_table_c21_c22,
    stringprep.in_table_c3,
    stringprep.in_table_c4,
    stringprep.in_table_c5,
    stringprep.in_table_c6,
    stringprep.in_table_c7,
    stringprep.in_table_c8,
    stringprep.in_table_c9,
)


def prepared(text: str) -> str:
    """Returns the prepared text. Raises ValueError in words that continue "the password …"."""
    if not text.isascii():
        spaced = "".join(" " if stringprep.in_table_c12(c) else c for c in text)
        text = unicodedata.ucd_3_2_0.normalize(
            "NFKC", "".join(c for c in spaced if not stringprep.in_table_b1(c))
        )
    if not text or any(forbidden(c) for c in text for forbidden in _FORBIDDEN):
        raise ValueError("is empty or has characters that SCRAM cannot send (RFC 4013)")
    _check_direction(text)
    return text


def _check_direction(text: str) -> None:
    """Checks that right-to-left text begins and ends with such letters, and has none of the others (RFC 3454
    6).
    """
    if text.isascii() or not any(map(stringprep.in_table_d1, text)):
        return
    ends = stringprep.in_table_d1(text[0]) and stringprep.in_table_d1(text[-1])
    if not ends or any(map(stringprep.in_table_d2, text)):
        raise ValueError("mixes directions of writing in a way that SCRAM cannot send (RFC 4013)")
