"""[[listener]], [auth] and [[access]]: values that are wrong, settings that contradict each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from zonerelay.config.load import load_text
from zonerelay.config.settings import ListenerAuth, ListenerTls, Settings

CERTIFIED = 'tls = "starttls"\ncertificate = "/c.pem"\n'
DIGEST = "0123456789abcdef" * 4


def test_one_certificate_needs_no_brackets() -> None:
    (listener,) = load_text('[[listener]]\ntls = "implicit"\ncertificate = "/a.pem"\nkey = "/a.key"').listener
    assert (listener.certificate, listener.key) == ((Path("/a.pem"),), (Path("/a.key"),))
    assert load_text('[[listener]]\ncertificate = ""').listener[0].certificate == ()


@pytest.mark.parametrize(
    "written",
    [
        DIGEST.upper(),
        ":".join(DIGEST[at : at + 2] for at in range(0, 64, 2)).upper(),
        f"sha256 Fingerprint={DIGEST}",
        f"SHA256:{DIGEST}",
    ],
    ids=["upper case", "with colons", "as openssl prints it", "with the name of the hash"],
)
def test_a_fingerprint_may_be_written_as_any_tool_prints_it(written: str) -> None:
    text = f'[[listener]]\n{CERTIFIED}allow_certificates = ["{written}"]'
    assert load_text(text).listener[0].allow_certificates == (DIGEST,)


def test_the_defaults_offer_nothing_that_needs_care() -> None:
    (listener,) = Settings().listener
    assert (listener.tls, listener.auth) == (ListenerTls.NONE, ListenerAuth.OFF)
    assert (listener.proxy_networks, listener.xclient_networks, listener.policy) == ((), (), "")
    assert all(network.is_loopback for network in listener.allow_networks)
