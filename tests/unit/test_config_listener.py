"""[[listener]], [auth] and [[access]]: values that are wrong, settings that contradict each other."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import pytest

from zonerelay.config.load import load_text
from zonerelay.config.settings import (
    AccessAction,
    AccessSettings,
    AuthSettings,
    ListenerAuth,
    ListenerTls,
    Settings,
)

CERTIFIED = 'tls = "starttls"\ncertificate = "/c.pem"\n'
DIGEST = "0123456789abcdef" * 4


def test_every_option_of_who_may_send_is_read() -> None:
    settings = load_text(f"""
        [[listener]]
        tls = "starttls"
        certificate = ["/a.pem", "/b.pem"]
        key = ["/a.key", "/b.key"]
        require_tls = true
        auth = "optional"
        max_auth_failures = 5
        allow_certificates = ["{DIGEST}"]
        proxy_networks = ["10.0.0.7"]
        xclient_networks = ["10.0.0.8"]
        check_sender_domain = true
        policy = "mypolicy:Mine"
        policy_file = "/etc/zonerelay/mine.txt"
        policy_timeout = "2s"
        hide_client = true
        [auth]
        credentials = "/etc/zonerelay/users"
        max_client_failures = 20
        forget_failures = "1h"
        [[access]]
        client = ["10.0.7.0/24"]
        sender = ["bounce-*@example.net", "Example.COM", "*.example.org", "<>", "*"]
        recipient = ["someone@example.com"]
        user = ["*"]
        action = "defer"
        reply = "451 4.7.1 Not before noon"
    """)
    (listener,) = settings.listener
    assert listener.tls is ListenerTls.STARTTLS
    assert listener.certificate == (Path("/a.pem"), Path("/b.pem"))
    assert listener.key == (Path("/a.key"), Path("/b.key"))
    assert listener.auth is ListenerAuth.OPTIONAL
    assert (listener.require_tls, listener.check_sender_domain, listener.hide_client) == (True, True, True)
    assert listener.allow_certificates == (DIGEST,)
    assert listener.proxy_networks == (ipaddress.ip_network("10.0.0.7"),)
    assert (listener.policy, listener.policy_timeout) == ("mypolicy:Mine", 2.0)
    assert settings.auth == AuthSettings(
        credentials=Path("/etc/zonerelay/users"), max_client_failures=20, forget_failures=3600.0
    )
    assert settings.access == (
        AccessSettings(
            client=(ipaddress.ip_network("10.0.7.0/24"),),
            sender=("bounce-*@example.net", "example.com", "*.example.org", "<>", "*"),
            recipient=("someone@example.com",),
            user=("*",),
            action=AccessAction.DEFER,
            reply="451 4.7.1 Not before noon",
        ),
    )


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
