"""Secrets are read whole or not at all, and no part of one is in an error."""

from __future__ import annotations

import pytest

from zonerelay.config.credentials.secrets import SecretError, read_secret


def test_what_is_not_utf8_in_the_environment_is_an_error_in_words() -> None:
    """Python hands such octets on as surrogates, which nothing can be done with later."""
    assert read_secret("env:WORD", {"WORD": "gehöft"}) == "gehöft"
    with pytest.raises(SecretError, match=r"^the environment variable WORD is not UTF-8$"):
        read_secret("env:WORD", {"WORD": b"geh\xf6ft".decode("utf-8", "surrogateescape")})
