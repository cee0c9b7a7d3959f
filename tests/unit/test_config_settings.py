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
    AccessAction,
    Backend,
    BareLineEnds,
    InDoubtAction,
    ListenerTls,
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
        tls = "starttls"
        certificate = ["/a.pem", "/b.pem"]
        key = ["/a.key", "/b.key"]
        policy = "mypolicy:Mine"
        policy_timeout = "2s"
        [auth]
        credentials = "/etc/zonerelay/users"
        [[access]]
        client = ["10.0.7.0/24"]
        sender = ["bounce-*@example.net", "Example.COM", "*.example.org", "<>", "*"]
        user = ["*"]
        action = "defer"
        reply = "451 4.7.1 Not before noon"
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
    assert (unix.certificate, unix.key[1]) == ((Path("/a.pem"), Path("/b.pem")), Path("/b.key"))
    assert (unix.tls, unix.policy, unix.policy_timeout) == (ListenerTls.STARTTLS, "mypolicy:Mine", 2.0)
    assert settings.auth.credentials == Path("/etc/zonerelay/users")
    (rule,) = settings.access
    assert rule.sender == ("bounce-*@example.net", "example.com", "*.example.org", "<>", "*")
    assert (rule.client, rule.user) == ((ipaddress.ip_network("10.0.7.0/24"),), ("*",))
    assert (rule.action, rule.reply) == (AccessAction.DEFER, "451 4.7.1 Not before noon")
    default, smart = settings.zone
    assert default.name == "default"
    assert (smart.name, smart.next_hop, smart.port) == ("smart_host-1.x", "[smtp.example.net]:587", 2525)
    assert smart.allow_private_addresses is True
    assert (smart.tls, smart.in_doubt) == (TlsMode.VERIFY, InDoubtAction.HOLD)
    assert settings.route[0].recipient_domain[:2] == ("example.com", "*.example.com")
    assert settings.retry.policy is RetryPolicyName.QUADRATIC
    assert settings.retry.jitter == 0.0
    assert settings.bounce.enabled is False
    assert settings.bounce.delay_warning == 0.0
    assert settings.dns.servers == ("127.0.0.1:5353", "::1")
    assert settings.log.redact_key_file == Path("/etc/zonerelay/redact.key")
    assert settings.admin.address == ""
    assert settings.admin.token_file is None


def test_inline_tables_and_dotted_keys_are_read_like_tables() -> None:
    assert load_text("retry.jitter = 0.5\nlog = { redact = false }\n").retry.jitter == 0.5


def test_a_key_with_a_line_end_stays_on_one_line() -> None:
    with pytest.raises(ConfigError) as caught:
        load_text('[log]\n"a\\nb" = 1\n')
    assert str(caught.value).startswith('log."a\\nb": ')


@pytest.mark.parametrize("text", ["x = " + "[" * 5000, "port = " + "1" * 5000], ids=["nested", "long"])
def test_text_that_is_too_much_for_the_parser_is_a_problem(text: str) -> None:
    (line,) = problems(text)
    assert line.startswith("test.toml: ")


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
            "hostname", "name", "path", "address", "schedule", "jitter", "max_connections", "tls",
            "default", "x",
        ),
        *(
            "= 1", "= 'x'", "= []", "= ['', 1]", "= {}", "= nan", "= 1e400", "= true", "= 00:00:00",
            "[", "]", "[[", "]]",
        ),
        *("\n", "#", '"', "'", ".", " ", '"""', "\x00", "é", "\r\n"),
    ]
)  # fmt: skip
STATEMENTS = st.sampled_from(
    [
        "[{}]\n", "[[{}]]\n", "{} = 1\n", "{} = 'x'\n", "{} = []\n", "{} = {{}}\n", "{} = [{{}}]\n",
        "{} = inf\n", "{} = ''\n",
    ]
)  # fmt: skip


@given(
    st.lists(WORDS, max_size=12).map("".join)
    | st.lists(st.tuples(STATEMENTS, WORDS).map(lambda t: t[0].format(t[1])), max_size=8).map("".join)
)
def test_any_text_is_loaded_or_refused(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(load_text(text), Settings)
