"""`zonerelay cert self-signed`: files that a relay can use, a client can trust, and nothing overwritten."""

from __future__ import annotations

import datetime
import json
import ssl
import tomllib
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from tests.support.tls_client import TlsClient
from zonerelay.cli.main import main
from zonerelay.config.load import load_text
from zonerelay.inbound.tls.certificate_files import read_pair
from zonerelay.inbound.tls.certificates import build_context
from zonerelay.inbound.tls.channel import TlsChannel, TlsFault

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


def test_the_configured_hostname_is_the_name_when_none_is_given(tmp_path: Path) -> None:
    config = tmp_path / "relay.toml"
    config.write_text('hostname = "relay.example.org"\n')
    assert main([*COMMAND, "--config", str(config)]) == 0
    assert read_pair(tmp_path / "relay.example.org.pem", tmp_path / "relay.example.org.key").names == (
        "relay.example.org",
    )


def test_a_configuration_that_waits_for_its_certificate_is_not_in_the_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.getfqdn", lambda: "host.example.org")
    config = tmp_path / "relay.toml"
    config.write_text('[[listener]]\ntls = "starttls"\n')
    assert main([*COMMAND, "--config", str(config)]) == 0
    assert "has errors" in capsys.readouterr().err
    assert (tmp_path / "host.example.org.key").exists()


def test_a_machine_without_a_full_name_is_called_localhost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.getfqdn", lambda: "a1b2c3")
    assert main(list(COMMAND)) == 0
    leaf = read_pair(tmp_path / "localhost.pem", tmp_path / "localhost.key").leaf
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name.value) for name in names] == ["localhost", "127.0.0.1"]


@pytest.mark.parametrize(
    ("line", "status", "words"),
    [
        (["--name", "no name"], 2, "not a domain name"),
        (["--certificate", "a.pem"], 2, "must be given together"),
        (["--certificate", "a.pem", "--key", "a.pem"], 2, "the same file"),
        (["--certificate", "a.pem", "--key", "b.pem", "--out", "."], 2, "--out names the files"),
        (["--name", "a.example", "--out", "/dev/null/x"], 1, "cannot be written"),
    ],
)
def test_mistakes_are_told_in_words(
    line: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, *line]) == status
    assert words in capsys.readouterr().err


def test_both_files_can_be_named(tmp_path: Path) -> None:
    line = ["--certificate", "deep/c.pem", "--key", "k.pem", "--name", "mail.example.org"]
    assert main([*COMMAND, *line]) == 0
    read_pair(tmp_path / "deep/c.pem", tmp_path / "k.pem")
