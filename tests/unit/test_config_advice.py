"""What a valid [[listener]], [auth] or [[access]] implies that its operator may not expect."""

from __future__ import annotations

import pytest

from zonerelay.config.checks import advice
from zonerelay.config.load import load_text

CLEAR = 'unsafe = ["cleartext-auth"]'
CERTIFIED = 'tls = "starttls"\ncertificate = "/c.pem"\n'
IMPLICIT = 'tls = "implicit"\ncertificate = "/c.pem"\n'
USERS = f'[[listener]]\n{CERTIFIED}auth = "required"\n'


def noted(text: str) -> list[str]:
    return list(advice(load_text(text), "relay.example.org"))


ADVICE = [
    (
        f'address = "10.0.0.1:587"\n{CERTIFIED}auth = "required"\n{CLEAR}',
        "unsafe: passwords may come to 10.0.0.1:587 in clear text",
    ),
    (
        f'address = "[::]:587"\n{CERTIFIED}auth = "optional"\nallow_networks = ["10.0.0.0/8"]',
        "require_tls: false: who logs in has to use TLS, but mail of allow_networks is taken in clear text",
    ),
    (f'address = "[::]:587"\n{IMPLICIT}', "tls: implicit on port 587"),
    (f'address = "[::]:25"\n{IMPLICIT}', 'say tls = "starttls", or port 465'),
    (f'address = "[::]:465"\n{CERTIFIED}', "tls: starttls on port 465"),
    ('address = "[::]:465"', 'say tls = "implicit", or port 587'),
    (
        f'{CERTIFIED}auth = "required"\nallow_networks = ["10.0.0.0/8"]',
        'allow_networks: not used with auth = "required"',
    ),
    ('proxy_networks = ["127.0.0.1"]', "proxy_networks: 127.0.0.1/32 is this machine"),
    (
        'xclient_networks = ["127.0.0.1"]',
        "xclient_networks: 127.0.0.1/32 is in allow_networks too: whatever it passes on without XCLIENT",
    ),
    ("hide_client = true", "hide_client: true: a Received field"),
    (
        'tls = "starttls"\ncertificate = "c.pem"\nkey = "/k.pem"',
        "certificate: c.pem is relative to the directory",
    ),
    ('tls = "starttls"\ncertificate = "/c.pem"\nkey = "k.pem"', "key: k.pem is relative to"),
    ('policy = "m:C"\npolicy_file = "x"', "policy_file: x is relative to"),
]


@pytest.mark.parametrize(("text", "said"), ADVICE)
def test_what_a_listener_implies_is_said_once(text: str, said: str) -> None:
    (line,) = noted(f"[[listener]]\n{text}\n")
    assert line.startswith("listener[0].")
    assert said in line


@pytest.mark.parametrize(
    "text",
    [
        f'address = "[::]:587"\n{CERTIFIED}auth = "required"',
        f'address = "[::]:587"\n{CERTIFIED}auth = "optional"\nrequire_tls = true',
        f'address = "[::]:587"\n{CERTIFIED}auth = "optional"',
        f'address = "[::]:465"\n{IMPLICIT}auth = "required"',
        CLEAR,
        f'{IMPLICIT}auth = "required"\n{CLEAR}',
        'proxy_networks = ["10.0.0.7"]',
        'xclient_networks = ["10.0.0.7"]',
        f'{IMPLICIT}auth = "required"\nxclient_networks = ["127.0.0.1"]',
    ],
)
def test_what_is_usual_needs_no_advice(text: str) -> None:
    assert noted(f"[[listener]]\n{text}\n") == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[auth]\ncredentials = "/x"', "auth: only for mail over HTTP: no listener has auth"),
        (f'{USERS}[auth]\ncredentials = "x"', "auth.credentials: x is relative to the directory"),
        (
            '[[access]]\nuser = ["a"]',
            "access[0].user: only matches mail over HTTP: no listener has auth",
        ),
        ('[[access]]\nsender = ["<>"]\naction = "accept"', "access[0].action: accept as the last rule"),
        (
            '[[route]]\nuser = ["a"]',
            "route[0].user: matches only mail submitted over HTTP: no listener has auth",
        ),
        (
            f'[[route]]\ncertificate = ["{"ab" * 32}"]',
            "route[0].certificate: never matches: no listener",
        ),
        ('[[listener]]\nzone_header = "X-Z"', "listener[0].zone_header: X-Z is taken out of every message"),
        (
            '[[listener]]\nzone_header = "X-Z"\nzone_header_users = ["*"]',
            "listener[0].zone_header_users: only matches mail over HTTP: no user can log in",
        ),
    ],
)
def test_what_is_never_used_is_said(text: str, said: str) -> None:
    (line,) = noted(text)
    assert line.startswith(said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("min_free_space = 0", "0: nothing is refused before the disk is full"),
        ('min_free_space = "47 MB"', "new mail is rejected when less than 48 MB"),
        ('write_buffer = "32 MB"', "new mail is rejected when less than 144 MB"),
        ('min_free_space = "48 MB"', ""),
        ('backend = "disk"\nmin_free_space = "1 MB"', ""),
    ],
)
def test_room_that_leveldb_needs_is_said(text: str, said: str) -> None:
    lines = noted(f"[spool]\n{text}\n")
    assert [line.startswith(f"spool.min_free_space: {said}") for line in lines] == [True] * bool(said)


@pytest.mark.parametrize("who", [USERS, '[[listener]]\nxclient_networks = ["10.0.0.7"]\n'])
def test_a_route_by_user_matches_where_somebody_can_be_one(who: str) -> None:
    assert noted(f'{who}[[route]]\nuser = ["a"]\n[[access]]\nuser = ["b"]\n') == []


NEVER = "route[1]: never matches: route[0] takes all its mail before it is asked"
OVERTAKEN = [
    ('recipient_domain = ["*"]', 'sender = ["<>"]', True),
    ('recipient = ["*"]', 'max_size = "1 MB"', True),
    ('sender = ["*"]', 'recipient = ["a@b"]', False),
    ('sender = ["*"]', 'sender = ["a@b", "c"]', True),
    ('sender = ["*"]', 'sender = ["a@b", "<>"]', False),
    ('recipient_domain = ["a", "b"]', 'recipient_domain = ["b"]\nsender = ["c"]', True),
    ('recipient_domain = ["a"]', 'recipient_domain = ["a", "b"]', False),
    ('recipient_domain = ["a"]\nsender = ["c"]', 'recipient_domain = ["a"]', False),
    ('min_size = "1 MB"', 'min_size = "2 MB"', True),
    ('min_size = "2 MB"', 'min_size = "1 MB"', False),
    ('max_size = "2 MB"', 'max_size = "1 MB"\nmin_size = "1 KB"', True),
    ('max_size = "1 MB"', 'max_size = "2 MB"', False),
    ('max_size = "1 MB"', 'min_size = "1 KB"', False),
    ('header = ["X-A", "X-B"]', 'header = ["X-B"]', True),
    ('client = ["10.0.0.0/8"]', 'client = ["10.0.0.0/8"]', True),
]


@pytest.mark.parametrize(("first", "second", "never"), OVERTAKEN)
def test_a_route_that_an_earlier_one_leaves_nothing_to_is_told(first: str, second: str, never: bool) -> None:
    assert noted(f"[[route]]\n{first}\n[[route]]\n{second}\n") == ([NEVER] if never else [])


def test_of_many_routes_only_those_that_take_everything_are_looked_at() -> None:
    many = "".join(f'[[route]]\nrecipient_domain = ["d{n}.example"]\n' for n in range(1000))
    assert noted(many + many) == []
    assert len(noted('[[route]]\nrecipient_domain = ["*"]\n' + many)) == 1000
