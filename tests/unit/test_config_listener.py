"""[[listener]], [auth] and [[access]]: values that are wrong, settings that contradict each other."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import pytest

from zonerelay.config.load import ConfigError, load_text
from zonerelay.config.settings import (
    AccessAction,
    AccessSettings,
    AuthSettings,
    ListenerAuth,
    ListenerTls,
    Settings,
)

OPEN = 'unsafe = ["open-relay"]'
CLEAR = 'unsafe = ["cleartext-auth"]'
CERTIFIED = 'tls = "starttls"\ncertificate = "/c.pem"\n'
IMPLICIT = 'tls = "implicit"\ncertificate = "/c.pem"\n'
DIGEST = "0123456789abcdef" * 4


def problems(text: str) -> list[tuple[str, str, int]]:
    with pytest.raises(ConfigError) as caught:
        load_text(text)
    return [(problem.path, problem.text, problem.line) for problem in caught.value.problems]


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


ONE_WRONG_VALUE = [
    ("[[listener]]\ntls = 'ssl'", "listener[0].tls", 'must be "none", "starttls" or "implicit"'),
    ("[[listener]]\ntls = 'starttsl'", "listener[0].tls", "did you mean starttls?"),
    ("[[listener]]\ntls = true", "listener[0].tls", "expected text in quotes, not true or false"),
    ("[[listener]]\nauth = 'on'", "listener[0].auth", 'must be "off", "optional" or "required"'),
    ("[[listener]]\nauth = 'require'", "listener[0].auth", "did you mean required?"),
    ("[[listener]]\nrequire_tls = 'yes'", "listener[0].require_tls", "true or false (no quotes)"),
    ("[[listener]]\ncertificate = 5", "listener[0].certificate", "expected text in quotes"),
    ("[[listener]]\ncertificate = '~/c.pem'", "listener[0].certificate", "~ depends on the user"),
    ("[[listener]]\nkey = ['/a', '~/c']", "listener[0].key[1]", "~ depends on the user"),
    ("[[listener]]\nkey = ['']", "listener[0].key[0]", "must not be empty"),
    ("[[listener]]\nmax_auth_failures = 0", "listener[0].max_auth_failures", "must be from 1 to 100"),
    (
        "[[listener]]\nallow_certificates = 'ab:cd'",
        "listener[0].allow_certificates",
        'expected a list in brackets, not text: write ["ab:cd"]',
    ),
    (
        f"[[listener]]\nallow_certificates = ['{DIGEST[:40]}']",
        "listener[0].allow_certificates[0]",
        "is not a SHA-256 fingerprint",
    ),
    (
        "[[listener]]\nallow_certificates = ['/etc/client.pem']",
        "listener[0].allow_certificates[0]",
        "as printed by openssl x509 -noout -fingerprint",
    ),
    (
        "[[listener]]\nproxy_networks = ['balancer']",
        "listener[0].proxy_networks[0]",
        'expected "192.0.2.0/24", "192.0.2.7" or "2001:db8::/32"',
    ),
    (
        "[[listener]]\npolicy = 'mypolicy.Mine'",
        "listener[0].policy",
        'write "module:name", as in "mypolicy:Mine"',
    ),
    ("[[listener]]\npolicy_timeout = 0", "listener[0].policy_timeout", "must be from 100ms to 5m"),
    ("[[listener]]\nmax_hold = '60d'", "listener[0].max_hold", "must be from 1s to 30d (or 0"),
    ("[[listener]]\nmin_data_rate = -1", "listener[0].min_data_rate", "(or 0 for none), not -1"),
    ("max_session_memory = '1 MB'", "max_session_memory", "must be from 16 MB"),
    ("[auth]\ncredentials = ''", "auth.credentials", "must not be empty"),
    ("[auth]\nmax_client_failures = 0", "auth.max_client_failures", "must be from 1"),
    ("[auth]\nforget_failures = 900", "auth.forget_failures", "900 has no unit"),
    (
        "[[access]]\nsender = ['a b@example.com']",
        "access[0].sender[0]",
        "is not an address pattern",
    ),
    ("[[access]]\nsender = ['<a@example.com>']", "access[0].sender[0]", "is not an address pattern"),
    ("[[access]]\nsender = ['a@b@c']", "access[0].sender[0]", "is not an address pattern"),
    ("[[access]]\nrecipient = ['exa mple']", "access[0].recipient[0]", "is not a domain"),
    ("[[access]]\nrecipient = ['a*.example']", "access[0].recipient[0]", "is not a domain"),
    ("[[access]]\nrecipient = ['']", "access[0].recipient[0]", "must not be empty"),
    ("[[access]]\nuser = 'app'", "access[0].user", 'write ["app"]'),
    (
        "[[access]]\nuser = ['a']\naction = 'reject'",
        "access[0].action",
        'must be "refuse", "defer" or "accept", not "reject"',
    ),
    (
        "[[access]]\nuser = ['a']\nreply = 'go away'",
        "access[0].reply",
        'such as "550 5.7.1 Ask postmaster@example.org',
    ),
    ("[[access]]\nuser = ['a']\nreply = '250 OK'", "access[0].reply", "a code from 400 to 599"),
    ("[[access]]\nuser = ['a']\nreply = '550'", "access[0].reply", "is not an error reply"),
    ("[[access]]\nuser = ['a']\nreply = '550 5.7.1'", "access[0].reply", "is not an error reply"),
    (
        "[[access]]\nuser = ['a']\nreply = '550 4.7.1 No'",
        "access[0].reply",
        "an optional status of the same class",
    ),
    (
        "[[access]]\nuser = ['a']\nreply = '550 grüße'",
        "access[0].reply",
        "an optional status of the same class",
    ),
    (
        f"[[access]]\nuser = ['a']\nreply = '550 {'x' * 400}'",
        "access[0].reply",
        "a reply may have at most",
    ),
]


@pytest.mark.parametrize(("text", "path", "said"), ONE_WRONG_VALUE)
def test_one_wrong_value_is_one_problem_that_says_what_to_write(text: str, path: str, said: str) -> None:
    ((where, what, line),) = problems(f"# a comment\n{text}\n")
    assert where == path
    assert said in what
    assert line == text.count("\n") + 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[listener]]\ncertificates = '/x'", "did you mean certificate?"),
        ("[[listener]]\ncredentials = '/x'", "it belongs in [auth]"),
        ("[auth]\nmax_auth_failures = 3", "it belongs in [[listener]]"),
        ("[[access]]\nrecipients = ['x@example.com']", "did you mean recipient?"),
        ("[access]\nuser = ['a']", "there may be several: write it in double brackets, [[access]]"),
        ("[[auth]]", "only one such table is allowed; write it in single brackets, [auth]"),
    ],
)
def test_a_key_in_the_wrong_place_is_told_the_right_one(text: str, said: str) -> None:
    ((_, what, _),) = problems(text)
    assert said in what


CONTRADICTIONS = [
    (
        'tls = "starttls"',
        "tls",
        '"starttls" needs certificate = "FILE" and key = "FILE" (zonerelay cert self-signed makes both)',
    ),
    ('tls = "implicit"\nkey = "/k"', "tls", '"implicit" needs certificate = "FILE"'),
    (
        'certificate = "/c"',
        "certificate",
        'is not used with tls = "none": say tls = "starttls" or "implicit"',
    ),
    ('key = "/k"', "key", 'is not used with tls = "none"'),
    (f'allow_certificates = ["{DIGEST}"]', "allow_certificates", 'is not used with tls = "none"'),
    (
        'tls = "starttls"\ncertificate = ["/a", "/b"]\nkey = "/k"',
        "key",
        "1 file for 2 files in certificate: give one for each, in the same order, or none",
    ),
    ('tls = "starttls"\ncertificate = "/a"\nkey = ["/k", "/l"]', "key", "2 files for 1 file in certificate"),
    (
        'tls = "starttls"\ncertificate = ["/a", "/b", "/a"]',
        "certificate[2]",
        '"/a" is certificate[0] already: was another one meant?',
    ),
    ("require_tls = true", "require_tls", 'needs tls = "starttls" (with "implicit" there is always TLS)'),
    (
        'auth = "optional"',
        "auth",
        '"optional" with tls = "none" would send passwords in clear text: give the listener tls, or write '
        'unsafe = ["cleartext-auth"]',
    ),
    ('auth = "required"', "auth", '"required" with tls = "none" would send'),
    ('protocol = "http"', "protocol", '"http" needs auth = "required"'),
    (
        'protocol = "http"\nauth = "required"\naddress = "192.0.2.1:8443"',
        "auth",
        '"required" with tls = "none" would send passwords in clear text',
    ),
    (
        f'protocol = "http"\n{CERTIFIED}auth = "required"',
        "tls",
        'is "none" or "implicit" with protocol = "http", which has no STARTTLS',
    ),
    (
        f'protocol = "http"\n{IMPLICIT}auth = "required"\nallow_certificates = ["{DIGEST}"]',
        "allow_certificates",
        "a token names the user (zonerelay token add)",
    ),
    (
        f'{CERTIFIED}auth = "required"\n{OPEN}',
        "unsafe",
        '"open-relay" is not used with auth = "required", which lets no client relay without logging in',
    ),
    (
        f'{CERTIFIED}auth = "required"\nallow_networks = ["0.0.0.0/0"]',
        "allow_networks",
        'is not used with auth = "required": a user who logs in may relay from anywhere. Leave it out',
    ),
    (
        f'{CERTIFIED}auth = "optional"\nallow_networks = ["0.0.0.0/0"]',
        "allow_networks",
        "would make this an open relay",
    ),
    (
        "allow_networks = []",
        "allow_networks",
        'is empty, so no client could relay: name a network, such as "127.0.0.0/8", or say auth = "required"',
    ),
    (
        'proxy_networks = ["0.0.0.0/0"]',
        "proxy_networks",
        '"0.0.0.0/0" would let every client claim any address: name the servers in front of this one',
    ),
    (
        'xclient_networks = ["0.0.0.0/1", "128.0.0.0/1"]',
        "xclient_networks",
        '"0.0.0.0/0" would let every client claim any address',
    ),
    (
        'address = "unix:/x"\nproxy_networks = ["127.0.0.1"]',
        "proxy_networks",
        "is not used on a Unix socket, whose clients have no address",
    ),
    (
        'address = "unix:/x"\nxclient_networks = ["127.0.0.1"]',
        "xclient_networks",
        "is not used on a Unix socket",
    ),
    (
        'policy_file = "/x"',
        "policy_file",
        'is not used without a policy: say policy = "module:Class" or leave it out',
    ),
]


@pytest.mark.parametrize(("text", "key", "said"), CONTRADICTIONS)
def test_a_listener_that_contradicts_itself_is_refused(text: str, key: str, said: str) -> None:
    ((where, what, line),) = problems(f"[[listener]]\n{text}\n")
    assert where == f"listener[0].{key}"
    assert said in what
    assert line > 1


RULES = [
    ('[[access]]\naction = "refuse"', "access[0]", "so it would match all mail"),
    (
        '[[access]]\nuser = ["a"]\naction = "accept"\nreply = "550 No"',
        "access[0].reply",
        'is not used with action = "accept": leave one of the two out',
    ),
    (
        '[[access]]\nuser = ["a"]\nreply = "450 4.7.1 Later"',
        "access[0].reply",
        'action = "refuse" is answered with a code from 500 to 599: write one, or action = "defer"',
    ),
    (
        '[[access]]\nuser = ["a"]\naction = "defer"\nreply = "550 No"',
        "access[0].reply",
        'action = "defer" is answered with a code from 400 to 499: write one, or action = "refuse"',
    ),
    (
        '[[access]]\nuser = ["a"]\naction = "defer"\nreply = "421 4.7.0 Bye"',
        "access[0].reply",
        "which no rule does: write 450 or 451",
    ),
]


@pytest.mark.parametrize(("text", "path", "said"), RULES)
def test_a_rule_that_contradicts_itself_is_refused(text: str, path: str, said: str) -> None:
    ((where, what, _),) = problems(text)
    assert where == path
    assert said in what


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ('tls = "ssl"\nkey = "/k"\nrequire_tls = true\nauth = "required"', ["tls"]),
        ('tls = "starttls"\ncertificate = ["~/a", "/b"]\nkey = ["/k", "/l"]', ["certificate[0]"]),
        ('tls = "starttls"\ncertificate = "/a"\nkey = ["~/k", "/l"]', ["key[0]"]),
        ('tls = "starttls"\ncertificate = "~/a"', ["certificate"]),
        ('auth = "required"\nunsafe = 5', ["unsafe"]),
        ('auth = "on"\nallow_networks = []', ["auth"]),
        (f'{CERTIFIED}allow_networks = []\nallow_certificates = ["x"]', ["allow_certificates[0]"]),
        ('policy = "x"\npolicy_file = "/x"', ["policy"]),
        ('tls = "none"\ncertificate = "/c"\nkey = ["/k", "/l"]', ["certificate", "key"]),
    ],
)
def test_a_value_that_cannot_be_read_causes_no_second_complaint(text: str, paths: list[str]) -> None:
    found = [where.removeprefix("listener[0].") for where, *_ in problems(f"[[listener]]\n{text}\n")]
    assert found == paths


ACCEPTED = [
    f'{CERTIFIED}auth = "optional"',
    f"{IMPLICIT}require_tls = true",
    'tls = "starttls"\ncertificate = ["/a", "/b"]\nkey = ["/k", "/k"]',
    f'{CERTIFIED}auth = "required"\nallow_networks = []',
    f'{IMPLICIT}allow_networks = []\nallow_certificates = ["{DIGEST}"]',
    f'auth = "required"\n{CLEAR}',
    'protocol = "http"\nauth = "required"',
    f'{CERTIFIED}auth = "optional"\n{OPEN}',
    f"allow_networks = []\n{OPEN}",
    f'address = "unix:/x"\nauth = "required"\n{CLEAR}',
    "max_connections = 20\nmax_connections_per_client = 1000",
    'proxy_networks = ["10.0.0.0/8", "fc00::/7"]',
]


@pytest.mark.parametrize("text", ACCEPTED)
def test_a_listener_that_only_looks_odd_is_accepted(text: str) -> None:
    load_text(f"[[listener]]\n{text}\n")


def test_the_defaults_offer_nothing_that_needs_care() -> None:
    (listener,) = Settings().listener
    assert (listener.tls, listener.auth) == (ListenerTls.NONE, ListenerAuth.OFF)
    assert (listener.proxy_networks, listener.xclient_networks, listener.policy) == ((), (), "")
    assert all(network.is_loopback for network in listener.allow_networks)
