"""A real validating resolver: unbound from Debian, on a loopback port, in front of zones that we sign.

    zones = {
        "signed.example": {
            "@": {"MX": ["10 mx"]},
            "mx": {"A": ["127.0.0.1"]},
            "_25._tcp.mx": {"TLSA": ["3 1 1 …"]},
        },
        "plain.example": {"@": {"MX": ["10 mx"]}, "mx": {"A": ["127.0.0.1"]}},
    }
    resolver = ValidatingResolver(directory, zones, signed=["signed.example"])
    with resolver.running():
        settings = DnsSettings(servers=(resolver.address,), trust_ad=True)

Zones in `signed` are signed by dnspython with a key that is unbound's trust anchor for them; the others have
none above them, so they are insecure. Signatures of `bogus` (name, type) are broken after signing. unbound
serves them all from its own zone files and validates what it finds there; its only root server is this
machine, where nobody answers, so nothing leaves it.

The package is unpacked into `.cache` (see `debian`), never installed.
"""

import datetime
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import dns.dnssec
import dns.message
import dns.name
import dns.query
import dns.rdataset
import dns.rdatatype
import dns.zone
from cryptography.hazmat.primitives.asymmetric import ec

from tests.support.debian import ready_package
from tests.support.ports import LOOPBACK, free_port
from tests.support.servers import running_server
from zonerelay.routing.dns import dnspython_reader  # noqa: F401 - it reads what dnspython alone refuses

PROGRAM = "usr/sbin/unbound"
TTL = 60

Records = Mapping[str, Mapping[str, Sequence[str]]]
"""Record texts by name and type; names are relative to the zone, `@` is the zone itself."""


class ValidatingResolver:
    def __init__(
        self,
        directory: Path,
        zones: Mapping[str, Records],
        *,
        signed: Collection[str],
        bogus: Collection[tuple[str, str]] = (),
    ) -> None:
        self._package = ready_package("unbound", PROGRAM)
        self._directory = directory
        self._zones = zones
        self._signed = signed
        self._bogus = {(dns.name.from_text(name), dns.rdatatype.from_text(kind)) for name, kind in bogus}
        self._anchors: list[str] = []
        self._port = free_port()

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self._port}"

    @contextmanager
    def running(self) -> Iterator[None]:
        self._directory.mkdir(parents=True, exist_ok=True)
        for origin, records in self._zones.items():
            zone = zone_of(origin, records)
            if origin in self._signed:
                self._anchors.append(self._sign(zone))
            zone.to_file(str(self._directory / f"{origin}.zone"), relativize=False)
        (self._directory / "anchors").write_text("\n".join(self._anchors) + "\n")
        (self._directory / "root").write_text(
            f". 3600 IN NS nobody.invalid.\nnobody.invalid. 3600 IN A {LOOPBACK}\n"
        )
        configuration = self._directory / "unbound.conf"
        configuration.write_text(self._configuration())
        environment = {"LD_LIBRARY_PATH": self._package.library_path()}
        command = [self._package.path(PROGRAM), "-d", "-p", "-c", configuration]
        log = self._directory / "unbound.log"
        with running_server(command, log, self._answers, environment=environment):
            yield

    def _answers(self) -> bool:
        question = dns.message.make_query(next(iter(self._zones)), "SOA")
        try:
            return bool(dns.query.tcp(question, LOOPBACK, timeout=1.0, port=self._port).answer)
        except (OSError, EOFError, dns.exception.DNSException):
            return False

    def _sign(self, zone: dns.zone.Zone) -> str:
        """Signs in place; returns the trust anchor."""
        key = ec.generate_private_key(ec.SECP256R1())
        public = dns.dnssec.make_dnskey(key.public_key(), "ECDSAP256SHA256", flags=257)
        an_hour_ago = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
        dns.dnssec.sign_zone(
            zone, keys=[(key, public)], inception=an_hour_ago, lifetime=86400, dnskey_ttl=TTL
        )
        assert zone.origin is not None
        for name, kind in self._bogus:
            if name.is_subdomain(zone.origin):
                _break_signature(zone, name, kind)
        return f"{zone.origin} IN DS {dns.dnssec.make_ds(zone.origin, public, 'SHA256')}"

    def _configuration(self) -> str:
        zones = "".join(
            f'auth-zone:\n  name: "{origin}"\n  zonefile: "{self._directory}/{origin}.zone"\n'
            "  for-downstream: no\n  for-upstream: yes\n"
            for origin in self._zones
        )
        return f"""
server:
  interface: {LOOPBACK}
  port: {self._port}
  access-control: 127.0.0.0/8 allow
  do-ip6: no
  do-daemonize: no
  num-threads: 1
  username: ""
  chroot: ""
  directory: "{self._directory}"
  pidfile: ""
  use-syslog: no
  logfile: "{self._directory}/unbound.log"
  val-log-level: 2
  module-config: "validator iterator"
  root-hints: "{self._directory}/root"
  trust-anchor-file: "{self._directory}/anchors"
  do-not-query-localhost: no
remote-control:
  control-enable: no
{zones}"""


def zone_of(origin: str, records: Records) -> dns.zone.Zone:
    lines = [
        f"$ORIGIN {origin}.",
        f"@ {TTL} IN SOA ns root 1 3600 600 86400 {TTL}",
        f"@ {TTL} IN NS ns",
        f"ns {TTL} IN A {LOOPBACK}",
    ]
    for name, kinds in records.items():
        for kind, texts in kinds.items():
            lines += [f"{name} {TTL} IN {kind} {text}" for text in texts]
    return dns.zone.from_text("\n".join(lines) + "\n", origin=f"{origin}.", relativize=False)


def _break_signature(zone: dns.zone.Zone, name: dns.name.Name, kind: dns.rdatatype.RdataType) -> None:
    signatures = zone.find_rdataset(name, dns.rdatatype.RRSIG, covers=kind)
    signature = next(iter(signatures))
    broken = signature.replace(signature=bytes([signature.signature[0] ^ 1]) + signature.signature[1:])
    zone.replace_rdataset(name, dns.rdataset.from_rdata(TTL, broken))
