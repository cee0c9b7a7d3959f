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
        "passwords in clear text, with TLS on offer",
        f'address = "10.0.0.1:587"\n{CERTIFIED}auth = "required"\n{CLEAR}',
        "unsafe: passwords may come to 10.0.0.1:587 in clear text",
    ),
    (
        "mail in clear text beside log-ins",
        f'address = "[::]:587"\n{CERTIFIED}auth = "optional"\nallow_networks = ["10.0.0.0/8"]',
        "require_tls: false: who logs in has to use TLS, but mail of allow_networks is taken in clear text",
    ),
    ("implicit TLS on 587", f'address = "[::]:587"\n{IMPLICIT}', "tls: implicit on port 587"),
    ("implicit TLS on 25", f'address = "[::]:25"\n{IMPLICIT}', 'say tls = "starttls", or port 465'),
    ("STARTTLS on 465", f'address = "[::]:465"\n{CERTIFIED}', "tls: starttls on port 465"),
    ("no TLS on 465", 'address = "[::]:465"', 'say tls = "implicit", or port 587'),
    (
        "networks that nobody looks at",
        f'{CERTIFIED}auth = "required"\nallow_networks = ["10.0.0.0/8"]',
        'allow_networks: not used with auth = "required"',
    ),
    (
        "a balancer here",
        'proxy_networks = ["127.0.0.1"]',
        "proxy_networks: 127.0.0.1/32 is this machine",
    ),
    (
        "a server in front that may relay itself",
        'xclient_networks = ["127.0.0.1"]',
        "xclient_networks: 127.0.0.1/32 is in allow_networks too: whatever it passes on without XCLIENT",
    ),
    ("nobody sees where it came from", "hide_client = true", "hide_client: true: a Received field"),
    (
        "a certificate somewhere",
        'tls = "starttls"\ncertificate = "c.pem"\nkey = "/k.pem"',
        "certificate: c.pem is looked for in the directory where the relay is started",
    ),
    (
        "a key somewhere",
        'tls = "starttls"\ncertificate = "/c.pem"\nkey = "k.pem"',
        "key: k.pem is looked for",
    ),
    ("a policy's file somewhere", 'policy = "m:C"\npolicy_file = "x"', "policy_file: x is looked for"),
]


@pytest.mark.parametrize(("reason", "text", "said"), ADVICE, ids=[reason for reason, *_ in ADVICE])
def test_what_a_listener_implies_is_said_once(reason: str, text: str, said: str) -> None:
    (line,) = noted(f"[[listener]]\n{text}\n")
    assert line.startswith("listener[0]."), reason
    assert said in line, reason


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("users from anywhere over STARTTLS", f'address = "[::]:587"\n{CERTIFIED}auth = "required"'),
        ("nothing in clear text", f'address = "[::]:587"\n{CERTIFIED}auth = "optional"\nrequire_tls = true'),
        ("users and this machine", f'address = "[::]:587"\n{CERTIFIED}auth = "optional"'),
        ("submission as RFC 8314 asks for it", f'address = "[::]:465"\n{IMPLICIT}auth = "required"'),
        ("words without AUTH", CLEAR),
        ("words where everything is TLS", f'{IMPLICIT}auth = "required"\n{CLEAR}'),
        ("a balancer elsewhere", 'proxy_networks = ["10.0.0.7"]'),
        ("a front elsewhere", 'xclient_networks = ["10.0.0.7"]'),
        (
            "a front here, and users only",
            f'{IMPLICIT}auth = "required"\nxclient_networks = ["127.0.0.1"]',
        ),
    ],
)
def test_what_is_usual_needs_no_advice(reason: str, text: str) -> None:
    assert noted(f"[[listener]]\n{text}\n") == [], reason


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[auth]\ncredentials = "/x"', "auth: only for mail over HTTP: no listener has auth"),
        (f'{USERS}[auth]\ncredentials = "x"', "auth.credentials: x is looked for in the directory"),
        ('[[access]]\nuser = ["a"]', "access[0].user: only matches mail over HTTP: no listener has auth"),
        ('[[access]]\nsender = ["<>"]\naction = "accept"', "access[0].action: accept as the last rule"),
        ('[[route]]\nuser = ["a"]', "route[0].user: only matches mail over HTTP: no listener has auth"),
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
        ('min_free_space = "47 MB"', "new mail is refused below 48 MB free: LevelDB needs that"),
        ('write_buffer = "32 MB"', "new mail is refused below 144 MB free: LevelDB needs that"),
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
    ('recipient_domain = ["*"]', 'sender = ["<>"]', True, "everything"),
    ('recipient = ["*"]', 'max_size = "1 MB"', True, "everything, in other words"),
    ('sender = ["*"]', 'recipient = ["a@b"]', False, "what is from <> is left"),
    ('sender = ["*"]', 'sender = ["a@b", "c"]', True, "any sender before some"),
    ('sender = ["*"]', 'sender = ["a@b", "<>"]', False, "any sender is not the null sender"),
    ('recipient_domain = ["a", "b"]', 'recipient_domain = ["b"]\nsender = ["c"]', True, "more before less"),
    ('recipient_domain = ["a"]', 'recipient_domain = ["a", "b"]', False, "less before more"),
    ('recipient_domain = ["a"]\nsender = ["c"]', 'recipient_domain = ["a"]', False, "some of it before all"),
    ('min_size = "1 MB"', 'min_size = "2 MB"', True, "large before larger"),
    ('min_size = "2 MB"', 'min_size = "1 MB"', False, "larger before large"),
    ('max_size = "2 MB"', 'max_size = "1 MB"\nmin_size = "1 KB"', True, "small before smaller"),
    ('max_size = "1 MB"', 'max_size = "2 MB"', False, "smaller before small"),
    ('max_size = "1 MB"', 'min_size = "1 KB"', False, "other bounds"),
    ('header = ["X-A", "X-B"]', 'header = ["X-B"]', True, "the same fields"),
    ('client = ["10.0.0.0/8"]', 'client = ["10.0.0.0/8"]', True, "the same twice"),
]


@pytest.mark.parametrize(("first", "second", "never", "reason"), OVERTAKEN, ids=[row[3] for row in OVERTAKEN])
def test_a_route_that_an_earlier_one_leaves_nothing_to_is_told(
    first: str, second: str, never: bool, reason: str
) -> None:
    assert noted(f"[[route]]\n{first}\n[[route]]\n{second}\n") == ([NEVER] if never else []), reason


def test_of_many_routes_only_those_that_take_everything_are_looked_at() -> None:
    many = "".join(f'[[route]]\nrecipient_domain = ["d{n}.example"]\n' for n in range(1000))
    assert noted(many + many) == []
    assert len(noted('[[route]]\nrecipient_domain = ["*"]\n' + many)) == 1000
