"""`zonerelay cert self-signed` and `zonerelay dkim`: keys that can be used, and nothing overwritten."""

import asyncio
import base64
import datetime
import json
import re
import ssl
import tomllib
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from tests.support.dkim import NOW, ed25519_pem, record, rsa_pem, sign, verified
from tests.support.dns import FakeDns, Zones
from tests.support.tls_client import TlsClient
from zonerelay.cli.main import main
from zonerelay.config.load import load_text
from zonerelay.inbound.tls.certificate_files import read_pair
from zonerelay.inbound.tls.certificates import build_context
from zonerelay.inbound.tls.channel import TlsChannel, TlsFault
from zonerelay.message.dkim.keys import DkimKeys
from zonerelay.message.dkim.signature import RelaxedBody
from zonerelay.routing.addresses import ascii_domain

COMMAND = ("cert", "self-signed")


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ZONERELAY_CONFIG", raising=False)


def test_a_client_that_trusts_the_certificate_accepts_the_server(tmp_path: Path) -> None:
    line = (*COMMAND, "--name", "Mail.Example.org", "--name", "192.0.2.1", "--name", "*.bücher.example")
    assert main([*line, "--out", str(tmp_path / "tls")]) == 0
    certificate, key = tmp_path / "tls/mail.example.org.pem", tmp_path / "tls/mail.example.org.key"
    server = build_context([read_pair(certificate, key)], ask_certificate=False)
    context = ssl.create_default_context(cafile=str(certificate))
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_STRICT  # the default from Python 3.13 on
    for name in ("mail.example.org", "192.0.2.1", "a.xn--bcher-kva.example"):
        client = TlsClient(TlsChannel(server), context, name=name)
        client.shake()
        assert client.error is None
    stranger = TlsClient(TlsChannel(server), context, name="other.example.org")
    with pytest.raises(TlsFault, match=r"does not accept our certificate \(alert: bad certificate\)"):
        stranger.shake()
    assert "not valid for 'other.example.org'" in str(stranger.error)


def test_the_key_is_for_its_owner_alone_and_the_certificate_is_no_authority(tmp_path: Path) -> None:
    assert main([*COMMAND, "--name", "mail.example.org", "--days", "30"]) == 0
    assert (tmp_path / "mail.example.org.key").stat().st_mode & 0o777 == 0o600
    pair = read_pair(tmp_path / "mail.example.org.pem", tmp_path / "mail.example.org.key")
    assert isinstance(pair.key, ec.EllipticCurvePrivateKey)
    constraints = pair.leaf.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert not constraints.ca
    assert pair.leaf.not_valid_after_utc - pair.leaf.not_valid_before_utc == datetime.timedelta(days=30)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "mail.example.org.key",
        "mail.example.org.pem",
    ]


def test_the_lines_to_paste_are_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--name", "mail.example.org"]) == 0
    out = capsys.readouterr().out
    pasted = out[out.index("[[listener]]") :]
    settings = load_text(pasted).listener[0]
    pair = read_pair(settings.certificate[0], settings.key[0])
    assert pair.fingerprint in out.replace(":", "").lower()
    assert tomllib.loads(pasted)["listener"][0]["tls"] == "starttls"


def test_json_says_the_same_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--name", "mail.example.org", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    pair = read_pair(Path(document["certificate"]), Path(document["key"]))
    assert document["names"] == ["mail.example.org"]
    assert document["expires"] == pair.not_after
    assert document["fingerprint"].replace(":", "").lower() == pair.fingerprint


def test_nothing_is_overwritten_without_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = tmp_path / "mail.example.org.key"
    key.write_text("precious")
    key.chmod(0o644)
    assert main([*COMMAND, "--name", "mail.example.org"]) == 1
    assert "already exists" in capsys.readouterr().err
    assert key.read_text() == "precious"
    assert not (tmp_path / "mail.example.org.pem").exists()
    assert main([*COMMAND, "--name", "mail.example.org", "--force"]) == 0
    assert key.stat().st_mode & 0o777 == 0o600
    read_pair(tmp_path / "mail.example.org.pem", key)


def test_the_hostname_is_the_name_also_while_the_file_waits_for_the_certificate(tmp_path: Path) -> None:
    config = tmp_path / "relay.toml"
    config.write_text('hostname = "relay.example.org"\n[[listener]]\ntls = "starttls"\n')
    assert main([*COMMAND, "--config", str(config)]) == 0
    assert read_pair(tmp_path / "relay.example.org.pem", tmp_path / "relay.example.org.key").names == (
        "relay.example.org",
    )


def test_a_broken_configuration_is_not_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.getfqdn", lambda: "host.example.org")
    config = tmp_path / "relay.toml"
    config.write_text("hostname = relay.example.org\n")
    assert main([*COMMAND, "--config", str(config)]) == 0
    assert (tmp_path / "host.example.org.key").exists()


def test_a_machine_without_a_name_is_localhost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.getfqdn", lambda: "a1b2c3")
    assert main(list(COMMAND)) == 0
    leaf = read_pair(tmp_path / "localhost.pem", tmp_path / "localhost.key").leaf
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name.value) for name in names] == ["localhost", "127.0.0.1"]


@pytest.mark.parametrize(
    ("line", "status", "words"),
    [
        (["--name", "no name"], 2, "not a domain name"),
        (["--name", "a.example", "--out", "/dev/null/x"], 1, "cannot be written"),
    ],
)
def test_mistakes_told(line: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, *line]) == status
    assert words in capsys.readouterr().err


# ---- zonerelay dkim: keys that sign, and records that fit them -------------------------------------


HEADER = b"From: ann@example.com\r\nSubject: x\r\n"
KEY_NAME = "s1._domainkey.example.com"


# new


@pytest.mark.parametrize("algorithm", ["rsa", "ed25519"])
def test_what_is_printed_verifies(algorithm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["dkim", "new", "--domain", "Example.com", "--selector", "s1", "--algorithm", algorithm]
    assert main([*line, "--out", "keys/s1.key"]) == 0
    out = capsys.readouterr().out
    key = tmp_path / "keys/s1.key"
    assert key.stat().st_mode & 0o777 == 0o600

    settings = load_text(re.search(r"\[\[dkim\]\](\n.+)+", out)[0])  # type: ignore[index]  # it is there
    assert settings.dkim[0].key_file == key
    keys = DkimKeys(settings.dkim, read=Path.read_bytes, ascii_domain=ascii_domain)
    message = sign(HEADER, RelaxedBody().digest(), keys.for_author("example.com", NOW), now=NOW) + HEADER

    strings = re.findall(r'^    "([^"]+)"$', out, re.MULTILINE)
    assert max(map(len, strings)) <= 255
    assert f"{KEY_NAME}. IN TXT (" in out
    assert f"\n{''.join(strings)}\n" in out
    assert verified(message, {KEY_NAME: "".join(strings)}) == [True]


def test_the_key_itself_is_not_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["dkim", "new", "--domain", "example.com", "--selector", "s1", "--out", "s1.key"]
    assert main(line) == 0
    printed = "".join(capsys.readouterr())
    lines = (tmp_path / "s1.key").read_text().splitlines()
    assert not [line for line in lines[1:-1] if line in printed]


def test_json_says_the_same_of_a_new_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["dkim", "new", "--domain", "bücher.example", "--selector", "s1", "--out", "s1.key", "--json"]
    assert main(line) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["key_file"] == str(tmp_path / "s1.key")
    assert document["name"] == "s1._domainkey.xn--bcher-kva.example"
    assert document["record"] == "".join(document["strings"]) == record((tmp_path / "s1.key").read_bytes())


def test_no_key_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s1.key").write_text("precious")
    line = ["dkim", "new", "--domain", "example.com", "--selector", "s1", "--out", "s1.key"]
    assert main(line) == 1
    assert "s1.key already exists" in capsys.readouterr().err
    assert (tmp_path / "s1.key").read_text() == "precious"


@pytest.mark.parametrize(
    ("domain", "selector", "problem"),
    [
        ("*.example.com", "s1", "--domain *.example.com: not a domain name"),
        ("exa mple.com", "s1", "--domain exa mple.com: not a domain name"),
        ("example.com", "s 1", '--selector: "s 1" is not a selector'),
    ],
)
def test_names_that_cannot_be_are_refused(
    domain: str, selector: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["dkim", "new", "--domain", domain, "--selector", selector, "--out", "s1.key"]
    assert main(line) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "s1.key").exists()


# check

Check = Callable[..., Awaitable[tuple[int, list[dict[str, object]]]]]


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    (tmp_path / "rsa.key").write_bytes(rsa_pem())
    (tmp_path / "ed.key").write_bytes(ed25519_pem())

    async def run(
        zones: Zones, *, entry: str = "", key: str = "rsa.key", domain: str = "example.com"
    ) -> tuple[int, list[dict[str, object]]]:
        async with FakeDns(zones) as dns:
            (tmp_path / "zonerelay.toml").write_text(
                f'[dns]\nservers = ["{dns.address}"]\n[[dkim]]\ndomain = "{domain}"\nselector = "s1"\n'
                f'key_file = "{key}"\n{entry}\n'
            )
            line = ["dkim", "check", "--config", "zonerelay.toml", "--json"]
            status = await asyncio.to_thread(main, line)
        return status, [json.loads(row) for row in capsys.readouterr().out.splitlines()]

    return run


def txt(*texts: str) -> Zones:
    """Each in strings of at most 255 octets, as DNS has them."""
    quoted = [
        " ".join(f'"{text[at : at + 255]}"' for at in range(0, len(text), 255)) or '""' for text in texts
    ]
    return {KEY_NAME: {"TXT": quoted}}


RSA_RECORD, ED_RECORD = record(rsa_pem()), record(ed25519_pem())
P = RSA_RECORD.partition("p=")[2]

RECORDS = [
    ("the very record", txt(RSA_RECORD), "ok", ""),
    ("blanks in it", txt(RSA_RECORD.replace("; ", " ;\t") + " ; "), "ok", ""),
    ("no version and no kind, which are the defaults", txt(f"p={P}"), "ok", ""),
    ("flags, hashes, services", txt(f"v=DKIM1; t=s; h=sha1:sha256; s=email; p={P}"), "ok", ""),
    ("no such name", {}, "missing", "the name does not exist: there is no TXT record"),
    ("another type", {KEY_NAME: {"A": ["192.0.2.1"]}}, "missing", "there is no TXT record"),
    ("another key", txt(record(rsa_pem(number=1))), "mismatch", "p= contains another key"),
    ("another kind of key", txt(ED_RECORD), "mismatch", "k=ed25519, but the key is rsa"),
    ("a key that is cut off", txt(RSA_RECORD[:255]), "mismatch", "p= contains another key"),
    ("octets that are no base64", txt("v=DKIM1; p=%%%%"), "mismatch", "p= contains another key"),
    ("revoked", txt("v=DKIM1; k=rsa; p="), "revoked", "p= is empty"),
    ("testing", txt(f"v=DKIM1; t=s:y; p={P}"), "testing", "t=y"),
    ("two records", txt(RSA_RECORD, "v=DKIM1; p="), "several", "there are 2 TXT records"),
    ("no key", txt("v=DKIM1; k=rsa"), "malformed", "has no p="),
    ("something else", txt("hello"), "malformed", "is not a tag list"),
    ("an empty text", txt(""), "malformed", "is not a tag list"),
    ("a tag twice", txt(f"p={P}; p={P}"), "malformed", "is not a tag list"),
    ("a version at the end", txt(f"p={P}; v=DKIM1"), "malformed", "v=DKIM1 must be the first tag"),
    ("another version", txt(f"v=DKIM2; p={P}"), "malformed", "v=DKIM1 must be"),
    ("only SHA-1", txt(f"v=DKIM1; h=sha1; p={P}"), "malformed", "h= does not allow sha256"),
    ("not for mail", txt(f"v=DKIM1; s=web; p={P}"), "malformed", "s= does not allow email"),
]  # fmt: skip


@pytest.mark.parametrize(("why", "zones", "status", "detail"), RECORDS, ids=[case[0] for case in RECORDS])
async def test_the_record_is_judged(why: str, zones: Zones, status: str, detail: str, check: Check) -> None:
    code, (row,) = await check(zones)
    assert (row["status"], row["record"], row["signs"]) == (status, KEY_NAME, "now")
    assert str(row["detail"]).startswith(detail)
    assert code == (0 if status == "ok" else 1)


async def test_an_ed25519_key_has_its_own_kind_of_record(check: Check) -> None:
    code, (row,) = await check(txt(ED_RECORD), key="ed.key")
    assert (code, row["status"], row["algorithm"], row["bits"]) == (0, "ok", "ed25519-sha256", 256)
    spki = base64.b64encode(b"0*0\x05\x06\x03+ep\x03!\x00" + base64.b64decode(ED_RECORD.partition("p=")[2]))
    code, (row,) = await check(txt(f"v=DKIM1; k=ed25519; p={spki.decode()}"), key="ed.key")
    assert (code, row["status"]) == (1, "mismatch")


async def test_an_alias_is_followed(check: Check) -> None:
    zones: Zones = {KEY_NAME: {"CNAME": ["s1.host.example"]}, "s1.host.example": txt(RSA_RECORD)[KEY_NAME]}
    code, (row,) = await check(zones)
    assert (code, row["status"]) == (0, "ok")


async def test_a_signing_domain_has_the_record(check: Check) -> None:
    code, (row,) = await check(
        txt(RSA_RECORD), domain="*.example.com", entry='signing_domain = "example.com"'
    )
    assert (code, row["status"], row["record"]) == (0, "ok", KEY_NAME)


async def test_records_below_a_wildcard_are_not_looked_up(check: Check) -> None:
    code, (row,) = await check({}, domain="*.example.com")
    assert (code, row["status"]) == (0, "wildcard")
    assert "with signing_domain a single record is enough" in str(row["detail"])


async def test_a_key_whose_time_is_over_needs_no_record(check: Check) -> None:
    code, (row,) = await check({}, entry="not_after = 2020-01-01")
    assert (code, row["status"], row["signs"]) == (0, "missing", "no more")


async def test_a_key_whose_time_comes_needs_its_record_before(check: Check) -> None:
    code, (row,) = await check({}, entry="not_before = 2999-01-01")
    assert (code, row["status"], row["signs"]) == (1, "missing", "later")


async def test_table_is_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str], check: Check) -> None:
    await check({})
    async with FakeDns(txt("v=DKIM1; p=")) as dns:
        path = tmp_path / "zonerelay.toml"
        path.write_text(re.sub(r"servers = .*", f'servers = ["{dns.address}"]', path.read_text()))
        assert await asyncio.to_thread(main, ["dkim", "check", "--config", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["KEY", "RECORD", "ALGORITHM", "SIGNS", "STATUS", "WHAT", "IS", "WRONG"]
    assert lines[1].split()[:6] == ["dkim[0]", KEY_NAME, "rsa", "2048", "now", "revoked"]


async def test_a_name_server_that_does_not_answer_proves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], check: Check
) -> None:
    await check({})
    path = tmp_path / "zonerelay.toml"
    path.write_text(re.sub(r"servers = .*", 'servers = ["127.0.0.1:1"]\ntimeout = "1s"', path.read_text()))
    assert await asyncio.to_thread(main, ["dkim", "check", "--config", str(path), "--json"]) == 1
    row = json.loads(capsys.readouterr().out)
    assert row["status"] == "unknown"


def test_without_keys_there_is_nothing_to_check(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "zonerelay.toml").write_text("")
    assert main(["dkim", "check", "--config", "zonerelay.toml"]) == 0
    assert "no [[dkim]] key" in capsys.readouterr().err


def test_a_key_that_cannot_be_read_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "zonerelay.toml").write_text(
        '[[dkim]]\ndomain = "example.com"\nselector = "s1"\nkey_file = "gone.key"\n'
    )
    assert main(["dkim", "check", "--config", "zonerelay.toml"]) == 2
    assert "dkim[0].key_file: gone.key cannot be read" in capsys.readouterr().err
