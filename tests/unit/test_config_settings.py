"""Reading a configuration: defaults, values, and every way in which a single value can be wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zonerelay.config.load import ConfigError, load, load_text
from zonerelay.config.options.options import option_of
from zonerelay.config.settings import (
    REPEATED,
    TABLES,
    Backend,
    BareLineEnds,
    InDoubt,
    RetryPolicyName,
    Settings,
    TlsMode,
)

RENDERED = re.compile(r"[^:\s]+: .+ \(line \d+\)")


def problems(text: str) -> list[str]:
    """What check-config would print, line by line."""
    with pytest.raises(ConfigError) as caught:
        load_text(text, "test.toml")
    lines = str(caught.value).split("\n")
    assert all(RENDERED.fullmatch(line) for line in lines), lines
    return lines


def test_an_empty_file_is_all_defaults() -> None:
    assert load_text("") == Settings()


def test_every_table_of_the_model_is_read() -> None:
    tables = [field.name for field in dataclasses.fields(Settings) if option_of(field) is None]
    assert tables == list(TABLES)
    defaults = Settings()
    for name, table in TABLES.items():
        default = getattr(defaults, name)
        assert isinstance(default, tuple) is (name in REPEATED)
        assert default in (table(), (table(),), ())


def test_values_of_every_form_are_read() -> None:
    settings = load_text("""
        hostname = "relay.example.org"
        workers = 1
        shutdown_timeout = "1.5m"
        [spool]
        backend = "memory"
        path = "var/spool"
        min_free_space = 0
        [[listener]]
        address = "[::]:25"
        tls = "none"
        auth = "off"
        allow_networks = ["192.0.2.7", "2001:db8::/32", "10.0.0.0/8"]
        bare_line_ends = "reject"
        max_message_size = "64 KB"
        max_recipients = 5
        [[listener]]
        address = "unix:/run/zonerelay/smtp.sock"
        allow_networks = []
        [[zone]]
        [[zone]]
        name = "smart_host-1.x"
        next_hop = "[smtp.example.net]:587"
        port = 2525
        allow_private_addresses = true
        tls = "verify"
        ehlo_name = "out.example.org"
        in_doubt = "hold"
        [[route]]
        zone = "smart_host-1.x"
        recipient_domain = ["Example.COM", "*.example.com", "*", "bücher.example", "[192.0.2.1]"]
        header = ["X-Stream", "X-Stream: bulk"]
        [retry]
        policy = "quadratic"
        max_attempts = 10
        jitter = 0
        [bounce]
        enabled = false
        delay_warning = 0
        [dns]
        servers = ["127.0.0.1:5353", "::1"]
        [log]
        redact_key_file = "/etc/zonerelay/redact.key"
        [admin]
        address = ""
        token_file = ""
    """)
    assert settings.hostname == "relay.example.org"
    assert settings.shutdown_timeout == 90.0
    assert settings.spool.backend is Backend.MEMORY
    assert settings.spool.path == Path("var/spool")
    assert settings.spool.min_free_space == 0
    tcp, unix = settings.listener
    assert tcp.allow_networks == tuple(
        map(ipaddress.ip_network, ("192.0.2.7/32", "2001:db8::/32", "10.0.0.0/8"))
    )
    assert tcp.bare_line_ends is BareLineEnds.REJECT
    assert (tcp.max_message_size, tcp.max_recipients) == (65_536, 5)
    assert (unix.address, unix.allow_networks) == ("unix:/run/zonerelay/smtp.sock", ())
    default, smart = settings.zone
    assert default.name == "default"
    assert (smart.name, smart.next_hop, smart.port) == ("smart_host-1.x", "[smtp.example.net]:587", 2525)
    assert smart.allow_private_addresses is True
    assert (smart.tls, smart.in_doubt) == (TlsMode.VERIFY, InDoubt.HOLD)
    assert settings.route[0].recipient_domain[:2] == ("example.com", "*.example.com")
    assert settings.retry.policy is RetryPolicyName.QUADRATIC
    assert settings.retry.jitter == 0.0
    assert settings.bounce.enabled is False
    assert settings.bounce.delay_warning == 0.0
    assert settings.dns.servers == ("127.0.0.1:5353", "::1")
    assert settings.log.redact_key_file == Path("/etc/zonerelay/redact.key")
    assert settings.admin.address == ""
    assert settings.admin.token_file is None


def test_inline_tables_and_dotted_keys_are_read_and_blamed_like_tables() -> None:
    assert load_text("retry.jitter = 0.5\nlog = { redact = false }\n").retry.jitter == 0.5
    assert problems(
        'retry.jitter = 0.5\nlog = { redact = "no" }\nzone = [\n { name = "default", prt = 1 },\n]\n'
    ) == [
        "log.redact: expected true or false (no quotes), not text (line 2)",
        "zone[0].prt: unknown key; did you mean port? (line 4)",
    ]


def test_every_problem_is_reported_at_once_in_the_order_of_the_file() -> None:
    assert problems(
        "hostnme = 'x'\n"
        "[spool]\n"
        "path = 3\n"
        "[[zone]]\n"
        "[[zone]]\n"
        "name = 'bulk'\n"
        "tls = 'off'\n"
        "[retry]\n"
        "schedule = ['1m',\n"
        "  5,\n"
        "  '2 weeks']\n"
    ) == [
        "hostnme: unknown key; did you mean hostname? (line 1)",
        "spool.path: expected text in quotes, not a number (line 3)",
        'zone[1].tls: must be "none", "opportunistic", "required", "verify" or "dane", not "off" (line 7)',
        'retry.schedule[1]: 5 has no unit; expected a duration such as "30s", "5m", "2h" or "5d" (line 10)',
        'retry.schedule[2]: "weeks" is not a unit of time; use ms, s, m, h or '
        'd, as in "30s", "5m", "2h" or "5d" (line 11)',
    ]


ONE_WRONG_VALUE = [
    ("hostname = 5", "hostname", "expected text in quotes, not a number"),
    ("hostname = 'a b'", "hostname", "is not a host name"),
    ('hostname = "a\\u0007"', "hostname", "without control characters"),
    ("workers = 'many'", "workers", 'a whole number such as 4, or "auto"'),
    ("workers = 129", "workers", "128"),
    ("workers = 0", "workers", "1"),
    ("workers = true", "workers", "a whole number such as 4"),
    ("[[zone]]\nmix_domains = 'yes'", "zone[0].mix_domains", 'expected true, false (no quotes) or "auto"'),
    ("[[zone]]\nmix_domains = 1", "zone[0].mix_domains", "expected true, false"),
    ("shutdown_timeout = 1979-05-27", "shutdown_timeout", "expected a duration such as"),
    ("shutdown_timeout = true", "shutdown_timeout", "not true or false"),
    ("[spool]\nenv_directory = '/q'", "spool.env_directory", 'goes with backend = "disk"'),
    ("[spool]\nmeta_directory = '/q'", "spool.meta_directory", 'goes with backend = "disk"'),
    (
        "[spool]\nbackend = 'memory'\nscratch_directory = '/q'",
        "spool.scratch_directory",
        'goes with backend = "disk"',
    ),
    ("[spool]\nshelve = '/q'", "spool.shelve", 'goes with backend = "memory"'),
    (
        "[spool]\nbackend = 'disk'\npath = '/q'\nscratch_directory = '/q'",
        "spool.scratch_directory",
        "needs a directory of its own",
    ),
    ("[s3]\nbucket = 'Mail_Queue'", "s3.bucket", "is not a bucket name"),
    ("[spool]\nbackend = 'LevelDB'", "spool.backend", "did you mean leveldb?"),
    ("[spool]\npath = ''", "spool.path", "must not be empty"),
    ("[spool]\npath = '~/spool'", "spool.path", "~ depends on the user"),
    ("[spool]\nmin_free_space = 100", "spool.min_free_space", "100 has no unit"),
    ("[spool]\nmin_free_space = '1 KB'", "spool.min_free_space", "must be from 1 MB to 1 TB (or 0 for none)"),
    ("[spool]\nwrite_buffer = 0", "spool.write_buffer", "must be from 1 MB to 256 MB, not 0 B"),
    ("[spool]\nwrite_buffer = false", "spool.write_buffer", "expected a size such as"),
    ("[[listener]]\naddress = 'localhost:25'", "listener[0].address", "is a host name"),
    ("[[listener]]\naddress = ''", "listener[0].address", "must not be empty"),
    ("[[listener]]\nallow_networks = '10.0.0.0/8'", "listener[0].allow_networks", 'write ["10.0.0.0/8"]'),
    (
        "[[listener]]\nallow_networks = ['10.0.0.1/8']",
        "listener[0].allow_networks[0]",
        'write the network "10.0.0.0/8" or',
    ),
    ("[[listener]]\nallow_networks = ['lan']", "listener[0].allow_networks[0]", '"lan" is not a network'),
    (
        "[[listener]]\nallow_networks = ['::ffff:0.0.0.0/96']",
        "listener[0].allow_networks[0]",
        "is an IPv4-mapped IPv6 address",
    ),
    ("[[listener]]\nallow_networks = [true]", "listener[0].allow_networks[0]", "expected text"),
    ("[[listener]]\nmax_recipients = 0", "listener[0].max_recipients", "must be from 1 to 100000, not 0"),
    ("[[listener]]\nmax_recipients = 1.5", "listener[0].max_recipients", "expected a whole number"),
    ("[[listener]]\nmax_recipients = true", "listener[0].max_recipients", "expected a whole number"),
    ("[[listener]]\nmax_recipients = '5'", "listener[0].max_recipients", "not text"),
    ("[[listener]]\nidle_timeout = 0", "listener[0].idle_timeout", "must be from 100ms to 1d, not 0s"),
    ("[[listener]]\nidle_timeout = '400d'", "listener[0].idle_timeout", "must be from"),
    ("[[zone]]\nname = ''", "zone[0].name", "must not be empty"),
    ("[[zone]]\nname = 'a b'", "zone[0].name", "is not a name"),
    ("[[zone]]\nname = 'a~'", "zone[0].name", "is not a name"),
    ("[[zone]]\nname = 'é'", "zone[0].name", "is not a name"),
    (f"[[zone]]\nname = '{'x' * 65}'", "zone[0].name", "1 to 64 letters"),
    ("[[zone]]\nport = 65536", "zone[0].port", "must be from 1 to 65535"),
    ("[[zone]]\nnext_hop = '192.0.2.300:25'", "zone[0].next_hop", "is not a next hop"),
    ("[[zone]]\nipv6 = 1", "zone[0].ipv6", "expected true or false"),
    ("[[listener]]\nzone_header = 'X-Zone: a'", "listener[0].zone_header", "is not a header field name"),
    ("[[listener]]\nzone_header = 'X Zone'", "listener[0].zone_header", "is not a header field name"),
    ("[[listener]]\nzone_header = 'Subject'", "listener[0].zone_header", "is a field that messages require"),
    ("[[listener]]\nzone_header = 'list-id'", "listener[0].zone_header", "is a field that messages require"),
    ("[[route]]\nrecipient = ['a b@c']", "route[0].recipient[0]", "not an address pattern"),
    ("[[route]]\nlistener = ['nowhere']", "route[0].listener[0]", "nowhere"),
    ("[[route]]\nclient = ['10.0.0.1/8']", "route[0].client[0]", "write the network"),
    ("[[route]]\ncertificate = ['ab']", "route[0].certificate[0]", "SHA-256"),
    ("[[route]]\nmin_size = 5", "route[0].min_size", "has no unit"),
    ("[[route]]\nuser = [1]", "route[0].user[0]", "expected text"),
    (
        "[[route]]\nrecipient_domain = ['joe@example.com']",
        "route[0].recipient_domain[0]",
        'only its domain, "example.com"',
    ),
    ("[[route]]\nrecipient_domain = ['*example.com']", "route[0].recipient_domain[0]", 'or "*.example.com"'),
    ("[[route]]\nrecipient_domain = ['a.*.com']", "route[0].recipient_domain[0]", "is not a domain"),
    ("[[route]]\nrecipient_domain = ['']", "route[0].recipient_domain[0]", "must not be empty"),
    ("[[route]]\nheader = ['two words: x']", "route[0].header[0]", "is not a header condition"),
    ("[retry]\npolicy = 'linear'", "retry.policy", 'must be "schedule", "exponential" or "quadratic"'),
    (
        "[retry]\nbackoff = 'module.function'",
        "retry.backoff",
        'write "module:name", as in "mypolicy:Mine" or "myretry:backoff"',
    ),
    ("[retry]\nbackoff = 'a b:c'", "retry.backoff", "does not name a function"),
    ("[retry]\njitter = 1.5", "retry.jitter", "must be from 0 to 1, not 1.5"),
    ("[retry]\njitter = nan", "retry.jitter", "must be from 0 to 1"),
    ("[retry]\njitter = '10%'", "retry.jitter", "expected a number such as 0.1"),
    ("[retry]\nschedule = ['0s']", "retry.schedule[0]", "must be from 100ms"),
    ("[retry]\nschedule = '5m'", "retry.schedule", 'write ["5m"]'),
    ("[dns]\nservers = ['ns.example.com']", "dns.servers[0]", "expected its address"),
    ("[log]\nformat = 'jsno'", "log.format", "did you mean json?"),
    ("[admin]\naddress = '8025'", "admin.address", "has no port"),
    ("[admin]\naddress = 'unix:/run/x'", "admin.address", "HTTP needs"),
]


@pytest.mark.parametrize(
    ("text", "path", "said"), ONE_WRONG_VALUE, ids=[f"{path}: {said}" for _, path, said in ONE_WRONG_VALUE]
)
def test_one_wrong_value_is_one_problem_with_its_key_and_line(text: str, path: str, said: str) -> None:
    (line,) = problems(f"# a comment\n{text}\n")
    assert line.startswith(f"{path}: ")
    assert said in line
    assert line.endswith(f"(line {text.count(chr(10)) + 2})")


UNKNOWN_KEYS = [
    (
        "[[listener]]\nmax_connection = 1",
        "listener[0].max_connection: unknown key; did you mean max_connections?",
    ),
    ("listner = 1", "listner: unknown key; did you mean listener?"),
    ("[Spool]", "Spool: unknown key; did you mean spool?"),
    ("[spool]\nhostname = 'x'", "spool.hostname: unknown key; hostname must be at the top of the file"),
    ("[spool]\nin_doubt = 'hold'", "spool.in_doubt: unknown key; it belongs in [[zone]]"),
    (
        "[dns]\nmax_connections = 1",
        "dns.max_connections: unknown key; it belongs in [[listener]] or [[zone]]",
    ),
    ("[log]\ncolour = 1", "log.colour: unknown key; known here are format, redact, redact_key_file"),
    ('[log]\n"for mat" = 1', 'log."for mat": unknown key; did you mean format?'),
]


@pytest.mark.parametrize(
    ("text", "said"), UNKNOWN_KEYS, ids=[said.partition(":")[0] for _, said in UNKNOWN_KEYS]
)
def test_an_unknown_key_is_told_where_it_should_go(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(text)
    assert str(caught.value).startswith(said)


def test_a_key_with_a_line_end_stays_on_one_line() -> None:
    with pytest.raises(ConfigError) as caught:
        load_text('[log]\n"a\\nb" = 1\n')
    assert str(caught.value).startswith('log."a\\nb": ')


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[[spool]]\npath = 'x'",
            "spool: only one such table is allowed; write it in single brackets, [spool] (line 1)",
        ),
        ("spool = 'x'", "spool: expected a table, [spool] (line 1)"),
        (
            "[listener]\nmax_errors = 1",
            "listener: there may be several: write it in double brackets, [[listener]] (line 1)",
        ),
        ("zone = 'x'", "zone: there may be several: write it in double brackets, [[zone]] (line 1)"),
    ],
)
def test_wrong_brackets_are_explained_and_cause_no_further_complaint(text: str, said: str) -> None:
    assert problems(text) == [said]


@pytest.mark.parametrize(
    ("text", "said", "line"),
    [
        ("a = 1\nb =\n", "is not valid TOML: invalid value", 2),
        ("\n\n[spool\npath = 'x'", "is not valid TOML: expected ']'", 3),
        ("[spool]\npath = 'x'\npath = 'y'", "is not valid TOML: this key is given twice", 3),
        ("[spool]\n[log]\n[spool]", "is not valid TOML: the table spool is given twice", 3),
        ("[zone]\n[zone]", "to define several, write each as [[zone]]", 2),
        ("hostname = 'x\n", "is not valid TOML", 1),
        ('[spool]\npath = """x', "is not valid TOML: unterminated string", 2),
        ("x = " + "[" * 5000, "nested too deeply", 1),
        ("port = " + "1" * 5000, "is not valid TOML", 1),
        ("hostname = relay", "is not valid TOML: invalid value", 1),
    ],
)
def test_text_that_is_no_toml_is_one_problem_with_its_line(text: str, said: str, line: int) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(text, "relay.toml")
    (problem,) = caught.value.problems
    assert problem.path == "relay.toml"
    assert said in problem.text
    assert problem.line == line


def test_a_file_is_read_with_or_without_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "relay.toml"
    path.write_bytes(b"\xef\xbb\xbfhostname = 'relay.example.org'\r\n")
    assert load(path).hostname == "relay.example.org"


def test_a_file_that_is_not_utf8_is_a_problem_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "relay.toml"
    path.write_bytes(b"# fine\nhostname = 'r\xe9'\n")
    with pytest.raises(ConfigError, match="is not UTF-8, as TOML requires"):
        load(path)


def test_a_file_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file or directory"):
        load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load(tmp_path)


# Whatever a file says, it is either loaded or refused with problems: nothing else escapes the loader.
WORDS = st.sampled_from(
    [
        *TABLES,
        *(
            "hostname",
            "name",
            "path",
            "address",
            "schedule",
            "jitter",
            "max_connections",
            "tls",
            "default",
            "x",
        ),
        *(
            "= 1",
            "= 'x'",
            "= []",
            "= ['', 1]",
            "= {}",
            "= nan",
            "= 1e400",
            "= true",
            "= 00:00:00",
            "[",
            "]",
            "[[",
            "]]",
        ),
        *("\n", "#", '"', "'", ".", " ", '"""', "\x00", "é", "\r\n"),
    ]
)
STATEMENTS = st.sampled_from(
    [
        "[{}]\n",
        "[[{}]]\n",
        "{} = 1\n",
        "{} = 'x'\n",
        "{} = []\n",
        "{} = {{}}\n",
        "{} = [{{}}]\n",
        "{} = inf\n",
        "{} = ''\n",
    ]
)


@given(
    st.lists(WORDS, max_size=12).map("".join)
    | st.lists(st.tuples(STATEMENTS, WORDS).map(lambda t: t[0].format(t[1])), max_size=8).map("".join)
)
def test_any_text_is_loaded_or_refused(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(load_text(text), Settings)
