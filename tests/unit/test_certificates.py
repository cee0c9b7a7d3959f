"""A listener's certificates: what is wrong in words, which one a client gets, and renewals under way."""

import errno
import gc
import os
import ssl
import weakref
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, rsa

from tests.support.certificates import DAY, NOW, Made, context_files, make
from tests.support.descriptors import no_descriptors_left
from tests.support.event_log import EventLog, events_into
from tests.support.tls_client import TlsClient, trusting
from zonerelay.config.settings import ListenerSettings, ListenerTls
from zonerelay.inbound.listen.listeners import earliest
from zonerelay.inbound.tls import certificate_files
from zonerelay.inbound.tls.asking import AskingContext
from zonerelay.inbound.tls.certificate_files import CertificateError, CertificatePair, parse_pair, read_pair
from zonerelay.inbound.tls.certificates import LOOK_EVERY, TRY_AGAIN, Certificates
from zonerelay.inbound.tls.channel import TlsFault
from zonerelay.model.clock import ManualClock
from zonerelay.telemetry.metrics.metrics import Metrics


class House:
    """Certificates in a directory of their own."""

    def __init__(self, directory: Path, *made: Made, allow: tuple[str, ...] = ()) -> None:
        self.clock = ManualClock()
        self.log = EventLog()
        self.directory = directory
        certificate, key = context_files(made, directory)
        self.settings = ListenerSettings(
            tls=ListenerTls.STARTTLS, certificate=certificate, key=key, allow_certificates=allow
        )
        self.events = events_into(self.log, self.clock)
        self.certificates = self.open()

    def open(self) -> Certificates:
        return Certificates(self.settings, clock=self.clock, events=self.events)

    def shown(self, name: str | None = None, version: ssl.TLSVersion | None = None) -> str:
        """The fingerprint of what a client that asks for this name is shown."""
        client = TlsClient(self.certificates.channel(), trusting(version), name=name)
        client.shake()
        return fingerprint(client)

    def told(self) -> list[tuple[str, dict[str, Any]]]:  # Any: fields of an event
        """The events since this was asked last."""
        entries, self.log.entries = self.log.entries, []
        return [(event, fields) for _, event, fields in entries]

    def later(self, seconds: float = LOOK_EVERY) -> None:
        self.clock.advance(seconds)


def fingerprint(client: TlsClient) -> str:
    der = client.ssl.getpeercert(binary_form=True)
    assert der is not None
    return x509.load_der_x509_certificate(der).fingerprint(hashes.SHA256()).hex()


# ---- which certificate a client gets ----------------------------------------------------------


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize(
    ("asked", "expected", "reason"),
    [
        (None, 0, "no name: the first"),
        ("mail.example.org", 0, "exact"),
        ("smtp.example.org", 0, "its second name"),
        ("MAIL.Example.NET", 1, "names have no case"),
        ("a.example.net", 2, "wildcard"),
        ("a.b.example.net", 0, "a wildcard is for one label"),
        ("example.net", 0, "a wildcard is for at least one label"),
        ("exact.example.net", 3, "an exact name comes before a wildcard"),
        ("xn--bcher-kva.example", 4, "A-labels"),
        ("common.example", 5, "a common name where there is no subjectAltName"),
        ("xn--mller-kva.example", 6, "which may be written in its own letters"),
        ("ignored.example", 0, "a common name beside subjectAltName is no name"),
        ("unknown.example", 0, "unknown: the first"),
    ],
)
def test_the_name_asked_for_chooses_the_certificate(
    tmp_path: Path, version: ssl.TLSVersion, asked: str | None, expected: int, reason: str
) -> None:
    made = [
        make("mail.example.org", "smtp.example.org"),
        make("mail.example.net", common_name="ignored.example"),
        make("*.example.net"),
        make("exact.example.net", "mail.example.net"),
        make("xn--bcher-kva.example"),
        make(common_name="Common.Example"),
        make(common_name="müller.example"),
    ]
    house = House(tmp_path, *made)
    assert house.shown(asked, version) == made[expected].fingerprint, reason


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of `ssl`
def test_a_name_that_is_not_ascii_is_refused_where_names_choose(tmp_path: Path) -> None:
    house = House(tmp_path, make("mail.example.org"), make("mail.example.net"))
    client = TlsClient(house.certificates.channel(), trusting(), name="mail.example.org")
    hello = client.hello().replace(b"mail.example.org", b"mail.ex\xffmple.org")
    with pytest.raises(TlsFault, match="not ASCII"):
        client.channel.receive(hello)


def test_a_client_certificate_is_asked_for_only_when_some_are_allowed(tmp_path: Path) -> None:
    made = [make("mail.example.org"), make("mail.example.net")]
    own = make(common_name="client")
    context = trusting()
    context.load_cert_chain(*own.write(tmp_path, "client"))
    for allow, seen in (((), ""), (("0" * 64,), own.fingerprint)):
        house = House(tmp_path, *made, allow=allow)
        for name in ("mail.example.org", "mail.example.net"):
            client = TlsClient(house.certificates.channel(), context, name=name)
            client.shake()
            assert client.channel.info is not None
            assert client.channel.info.certificate == seen


def test_sessions_resume_with_a_certificate_that_was_chosen_by_name(tmp_path: Path) -> None:
    house = House(tmp_path, make("mail.example.org"), make("mail.example.net"), allow=("0" * 64,))
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        context = trusting(version)
        first = TlsClient(house.certificates.channel(), context, name="mail.example.net")
        first.shake()
        first.decrypt(first.channel.send(b"220 relay.example.org ESMTP\r\n"))
        session = first.ssl.session
        again = TlsClient(house.certificates.channel(), context, name="mail.example.net", session=session)
        again.shake()
        assert again.ssl.session_reused


def test_the_whole_chain_is_sent(tmp_path: Path) -> None:
    root_key = ec.generate_private_key(ec.SECP256R1())
    leaf, issuer = make("mail.example.org"), make(common_name="Issuer", key=root_key)
    house = House(tmp_path, leaf)
    house.settings.certificate[0].write_bytes(leaf.pem + issuer.pem)
    house.certificates.refresh()
    client = TlsClient(house.certificates.channel(), trusting(ssl.TLSVersion.TLSv1_2))
    client.channel.receive(client.hello())
    assert issuer.der in client.channel.take_output()


def test_a_key_may_be_in_the_certificates_file_in_any_order(tmp_path: Path) -> None:
    made = make("mail.example.org")
    traditional = made.key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )
    parameters = b"-----BEGIN EC PARAMETERS-----\nBggqhkjOPQMBBw==\n-----END EC PARAMETERS-----\n"
    path = tmp_path / "both.pem"
    for text in (made.pem + made.key_pem, made.key_pem + made.pem, parameters + traditional + made.pem):
        path.write_bytes(b"a line of text, as openssl writes it\n" + text)
        assert read_pair(path, path).fingerprint == made.fingerprint


# ---- what is wrong, in words --------------------------------------------------------------------


def test_every_mistake_at_the_start_is_told_at_once(tmp_path: Path) -> None:
    house = House(tmp_path, make("a.example"), make("b.example"))
    for path in house.settings.certificate:
        path.unlink()
    with pytest.raises(CertificateError) as error:
        house.open()
    assert str(error.value).count("does not exist") == 2


def _csr(made: Made) -> bytes:
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(made.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


MADE, OTHER = make("mail.example.org"), make("other.example.org")
_ED448 = ed448.Ed448PrivateKey.generate().private_bytes(
    serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
)


@pytest.mark.parametrize(
    ("certificate", "key", "words"),
    [
        (b"", MADE.key_pem, "contains no certificate"),
        (MADE.pem, b"", "contains no private key"),
        (MADE.key_pem, MADE.pem, "swapped"),
        (MADE.pem, MADE.pem, "contains no private key: only a certificate"),
        (_csr(MADE), MADE.key_pem, "certificate request (CSR)"),
        (MADE.der, MADE.key_pem, "DER"),
        (b"text", MADE.key_pem, "it is not PEM"),
        (MADE.pem, OTHER.key_pem, "does not match the certificate in"),
        (OTHER.pem + MADE.pem, MADE.key_pem, "wrong order"),
        (MADE.pem, MADE.key_as(serialization.BestAvailableEncryption(b"x")), "encrypted with a passphrase"),
        (MADE.pem[:200] + b"!" + MADE.pem[200:], MADE.key_pem, "damaged"),
        (MADE.pem, MADE.key_pem[:60] + b"!" + MADE.key_pem[60:], "damaged"),
        (MADE.pem, _ED448, "Ed448 keys cannot be used"),
        (b"x" * 1_100_000, MADE.key_pem, "too large"),
    ],
)
def test_an_unusable_file_is_refused(tmp_path: Path, certificate: bytes, key: bytes, words: str) -> None:
    paths = tmp_path / "c.pem", tmp_path / "k.pem"
    paths[0].write_bytes(certificate)
    paths[1].write_bytes(key)
    with pytest.raises(CertificateError) as error:
        read_pair(*paths)
    assert words in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_files_that_are_not_there_or_are_no_files_are_refused_in_words(tmp_path: Path) -> None:
    certificate, key = MADE.write(tmp_path, "mail")
    dangling = tmp_path / "dangling.pem"
    dangling.symlink_to(tmp_path / "gone.pem")
    for path, words in (
        (tmp_path / "absent.pem", "does not exist; expected the certificate"),
        (dangling, "a link to a file that does not exist"),
        (tmp_path, "is a directory"),
        (Path("/dev/null"), "is not a file"),
    ):
        with pytest.raises(CertificateError) as error:
            read_pair(path, key)
        assert words in str(error.value)
    with pytest.raises(CertificateError, match="expected the private key there"):
        read_pair(certificate, tmp_path / "absent.key")


def test_a_file_that_may_not_be_read_says_who_has_to(tmp_path: Path) -> None:
    # The text alone: as root, tests may read everything.
    text = certificate_files._read_problem(
        tmp_path / "k.pem", "private key", PermissionError(errno.EACCES, "denied")
    )
    assert f"uid {os.geteuid()}" in text
    assert "permission denied" in text


def test_a_key_that_openssl_finds_too_small_is_refused(tmp_path: Path) -> None:
    small = make("mail.example.org", key=rsa.generate_private_key(65537, 1024))
    with pytest.raises(CertificateError, match="too small"):
        House(tmp_path, small)


# ---- renewals -----------------------------------------------------------------------------------


def test_a_renewed_certificate_serves_new_sessions_and_leaves_old_ones_alone(tmp_path: Path) -> None:
    old, new = make("mail.example.org"), make("mail.example.org")
    house = House(tmp_path, old)
    client = TlsClient(house.certificates.channel())
    client.shake()
    half_way = TlsClient(house.certificates.channel())
    half_way.channel.receive(half_way.hello())
    house.told()

    new.write(tmp_path, "0")
    assert house.shown() == old.fingerprint, "looked at once a second at most"
    house.later()
    assert house.shown() == new.fingerprint
    assert [event for event, _ in house.told()] == ["certificate-loaded"]

    assert client.send(b"NOOP\r\n") == b"NOOP\r\n"
    assert client.decrypt(client.channel.send(b"250 2.0.0 OK\r\n")) == b"250 2.0.0 OK\r\n"
    half_way.channel.receive(half_way.answer(half_way.channel.take_output()))
    assert half_way.channel.info
    assert fingerprint(half_way) == old.fingerprint


def test_a_renewed_certificate_that_pyopenssl_refuses_does_not_replace_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library that comes with cryptography may be another one than that of `ssl`."""
    old, new = make("old.example.org"), make("new.example.org")
    house = House(tmp_path, old, allow=("0" * 64,))
    begin = AskingContext.__init__

    def refusing(self: AskingContext, pair: CertificatePair, ciphers: str) -> None:
        if pair.name == "new.example.org":
            raise CertificateError("OpenSSL refuses new.example.org: ee key too small")
        begin(self, pair, ciphers)

    monkeypatch.setattr(AskingContext, "__init__", refusing)
    new.write(tmp_path, "0")
    house.later()
    assert house.shown() == old.fingerprint
    assert house.certificates.problems == ("OpenSSL refuses new.example.org: ee key too small",)


def test_only_the_certificate_that_changed_is_replaced(tmp_path: Path) -> None:
    first, second, renewed = make("a.example"), make("b.example"), make("b.example")
    house = House(tmp_path, first, second)
    renewed.write(tmp_path, "1")
    house.settings.certificate[0].write_bytes(b"broken meanwhile")
    house.later()
    assert house.shown("b.example") == renewed.fingerprint
    assert house.shown("a.example") == first.fingerprint
    assert len(house.certificates.problems) == 1


def test_certbots_links_are_followed(tmp_path: Path) -> None:
    old, new = make("mail.example.org"), make("mail.example.org")
    archive, live = tmp_path / "archive", tmp_path / "live"
    archive.mkdir()
    live.mkdir()
    house = House(live, old)
    paths = house.settings.certificate + house.settings.key
    for made, version in ((old, "1"), (new, "2")):
        for path, target in zip(paths, made.write(archive, version), strict=True):
            link = live / "next"
            link.symlink_to(target)
            link.replace(path)
        house.later()
        assert house.shown() == made.fingerprint


def test_a_key_that_comes_after_its_certificate_is_waited_for(tmp_path: Path) -> None:
    old, new = make("mail.example.org"), make("mail.example.org")
    house = House(tmp_path, old)
    house.told()
    house.settings.certificate[0].write_bytes(new.pem)
    for _ in range(3):
        house.later()
        assert house.shown() == old.fingerprint
    [(event, fields)] = house.told()
    assert event == "certificate-refused"
    assert "does not match the certificate in" in str(fields["problem"])
    assert house.certificates.problems == (fields["problem"],)

    house.settings.key[0].write_bytes(new.key_pem)
    house.later()
    assert house.shown() == new.fingerprint
    assert [event for event, _ in house.told()] == ["certificate-loaded"]
    assert not house.certificates.problems


def test_a_problem_that_lasts_is_logged_once_and_looked_into_again(tmp_path: Path) -> None:
    old = make("mail.example.org")
    house = House(tmp_path, old)
    house.told()
    house.settings.key[0].unlink()
    for _ in range(3):
        house.later(TRY_AGAIN)
        house.certificates.context()
    assert [event for event, _ in house.told()] == ["certificate-refused"]
    house.settings.key[0].write_bytes(old.key_pem)
    house.later()
    house.certificates.context()
    assert house.certificates.problems == ()
    assert house.told() == [], "the same certificate as before is no news"


def test_files_that_could_not_be_opened_are_read_later_though_they_are_unchanged(tmp_path: Path) -> None:
    house = House(tmp_path, make("mail.example.org"))
    new = make("mail.example.org")
    new.write(tmp_path, "0")
    house.later()
    with no_descriptors_left():
        house.certificates.context()
    assert "Too many open files" in house.certificates.problems[0]
    house.later(TRY_AGAIN - 1)
    house.certificates.context()
    assert house.certificates.problems, "not at every look: reading keys takes time"
    house.later(1.0)
    assert house.shown() == new.fingerprint
    assert not house.certificates.problems


def test_a_context_that_needs_a_descriptor_is_made_when_there_is_one(tmp_path: Path) -> None:
    house = House(tmp_path, make("mail.example.org"))
    before = house.certificates.context()
    house.later(DAY)
    with no_descriptors_left():
        assert house.certificates.context() is before
    house.later()
    assert house.certificates.context() is not before


def test_a_touched_file_changes_nothing(tmp_path: Path) -> None:
    house = House(tmp_path, make("mail.example.org"))
    house.told()
    before = house.certificates.context()
    house.settings.certificate[0].touch()
    house.later()
    assert house.certificates.context() is before
    house.certificates.refresh()
    assert house.certificates.context() is before
    assert house.told() == []


def test_files_that_hold_the_same_are_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An RSA key of 4096 bits takes a quarter of a second, in which nobody is answered."""
    parsed: list[Path] = []

    def counted(certificate: Path, key: Path, texts: certificate_files.Texts) -> CertificatePair:
        parsed.append(certificate)
        return parse_pair(certificate, key, texts)

    monkeypatch.setattr(certificate_files, "parse_pair", counted)
    old, new = make("a.example.org"), make("a.example.org")
    house = House(tmp_path, old)
    for _ in range(3):
        house.certificates.refresh()
    assert len(parsed) == 1
    new.write(tmp_path, "0")[1].write_bytes(old.key_pem)
    for _ in range(3):
        house.certificates.refresh()
        assert house.shown() == old.fingerprint
        assert len(house.certificates.problems) == 1
    assert len(parsed) == 2
    new.write(tmp_path, "0")
    house.certificates.refresh()
    assert house.shown() == new.fingerprint
    assert len(parsed) == 3
    assert house.certificates.problems == ()


def test_a_replaced_context_does_not_stay_in_memory(tmp_path: Path) -> None:
    house = House(tmp_path, make("a.example"), make("b.example"))
    watched = weakref.ref(house.certificates.context())
    make("a.example").write(tmp_path, "0")
    house.certificates.refresh()
    gc.collect()
    assert watched() is None


# ---- what the operator is told ------------------------------------------------------------------


def test_what_is_loaded_is_told(tmp_path: Path) -> None:
    made = make("mail.example.org", "smtp.example.org", ends=NOW + 90 * DAY)
    house = House(tmp_path, made)
    [(event, fields)] = house.told()
    assert (event, fields) == (
        "certificate-loaded",
        {
            "listener": "127.0.0.1:2525",
            "file": str(tmp_path / "0.pem"),
            "name": "mail.example.org",
            "names": 2,
            "expires": NOW + 90 * DAY,
            "fingerprint": made.fingerprint,
        },
    )
    assert house.certificates.expiries() == [("mail.example.org", NOW + 90 * DAY)]


def test_expiry_is_told_at_load_and_once_a_day(tmp_path: Path) -> None:
    house = House(tmp_path, make("mail.example.org", ends=NOW + 13 * DAY), make("fine.example"))
    events = house.told()
    assert [event for event, _ in events] == [
        "certificate-loaded",
        "certificate-expiring",
        "certificate-loaded",
    ]
    assert events[1][1]["days"] == 13.0
    told = 0
    for _ in range(72):
        house.later(3600.0)
        house.certificates.context()
        told += [event for event, _ in house.told()].count("certificate-expiring")
    assert told == 3


def test_an_expired_certificate_serves_and_is_a_problem(tmp_path: Path) -> None:
    made = make("mail.example.org", starts=NOW - 9 * DAY, ends=NOW - 2 * DAY)
    house = House(tmp_path, made)
    assert house.shown() == made.fingerprint
    assert "has expired" in house.certificates.problems[0]
    assert house.told()[1][1]["days"] == -2.0


def test_a_certificate_of_the_future_is_a_problem(tmp_path: Path) -> None:
    house = House(tmp_path, make("mail.example.org", starts=NOW + DAY))
    assert "not valid yet" in house.certificates.problems[0]


def test_a_key_that_everybody_can_read_is_told_once(tmp_path: Path) -> None:
    house = House(tmp_path, make("mail.example.org"))
    key = house.settings.key[0]
    key.chmod(0o644)
    house.told()
    house.certificates = house.open()
    [_, (event, fields)] = house.told()
    assert event == "advice"
    assert str(key) in str(fields["note"])
    make("mail.example.org").write(tmp_path, "0")
    key.chmod(0o644)
    house.certificates.refresh()
    assert [event for event, _ in house.told()] == ["certificate-loaded"]


def test_ticket_keys_do_not_last_for_ever(tmp_path: Path) -> None:
    house = House(tmp_path, make("mail.example.org"))
    before = house.certificates.context()
    house.later(DAY)
    assert house.certificates.context() is not before
    assert [event for event, _ in house.told()] == ["certificate-loaded"]


def test_the_certificate_that_expires_first_is_the_one_in_the_metric() -> None:
    metrics = Metrics()
    certificates = [("a.example", 30.0), ("a.example", 20.0), ("a.example", 25.0), ("b.example", 40.0)]
    metrics.read(lambda: {"zonerelay_certificate_expiry_timestamp_seconds": earliest(certificates)})
    metrics.tls_sessions.add(("TLSv1.3",))
    text = metrics.exposition().decode()
    assert 'zonerelay_certificate_expiry_timestamp_seconds{name="a.example"} 20.0' in text
    assert 'zonerelay_certificate_expiry_timestamp_seconds{name="b.example"} 40.0' in text
    assert 'zonerelay_inbound_tls_sessions_total{version="TLSv1.3"} 1.0' in text
