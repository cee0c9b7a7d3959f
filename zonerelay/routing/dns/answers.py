"""DNS answers as values that distinguish the kinds of failure.

`destinations/mx.py` decides which of them bounce mail: that a name does not exist is stated by the domain
itself, while a silent name server is a temporary failure.

The caches hold tens of thousands of these values. They contain only strings and numbers, so they are in no
reference cycle and the garbage collector need not inspect them (`gc=False`).
"""

from __future__ import annotations

import enum
from typing import Generic, TypeVar

import msgspec

from zonerelay.model.reply import Reply

Record = TypeVar("Record")


class DnsStatus(enum.StrEnum):
    """The status of a DNS answer, by kind of failure."""

    OK = "ok"
    NXDOMAIN = "the name does not exist"
    NODATA = "the name has no record of this type"
    SERVFAIL = "the name server returned a failure"
    TIMEOUT = "no name server responded in time"
    NO_TCP = "the response is too long for UDP, and no name server responded over TCP (port 53)"
    BAD = "the name server returned an invalid response"

    @property
    def is_definite(self) -> bool:
        """Whether the domain's own data determined the status. Any other status may be
        different in a minute.
        """
        return self in (DnsStatus.OK, DnsStatus.NXDOMAIN, DnsStatus.NODATA)


class MxRecord(msgspec.Struct, frozen=True, order=True, gc=False):
    """An MX record. `host` is an ASCII name in lower case without a final dot; `""` is the root
    (RFC 7505).
    """

    preference: int
    host: str


class TlsaRecord(msgspec.Struct, frozen=True, gc=False):
    """A TLSA record with the fields of RFC 6698 2.1, unchecked. `delivery/tls/dane.py` decides which records
    are usable.
    """

    usage: int
    selector: int
    matching: int
    data: bytes


class DnsAnswer(msgspec.Struct, Generic[Record], frozen=True, gc=False):
    """The answer to a DNS query. `records` is empty unless the status is OK. `expires` is on the monotonic
    clock.

    `secure` means that DNSSEC validates the answer, including denials, and the resolver is trusted
    (`trust_ad`). `canonical` is the name at the end of the aliases, if there are any.
    """

    status: DnsStatus
    records: tuple[Record, ...]
    expires: float
    secure: bool = False
    canonical: str = ""


class Addresses(msgspec.Struct, frozen=True):
    """The addresses of one host, most preferred first. Without any, `failure` says why, as a deferral.

    `secure` means that DNSSEC validates all of them and the aliases before them. `canonical` is the name at
    the end of the aliases.
    """

    ips: tuple[str, ...]
    failure: Reply | None = None
    secure: bool = False
    canonical: str = ""
