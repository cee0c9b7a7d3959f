"""What dnspython makes of a packet: the oracle for our own reader of plain DNS answers."""

import struct

from zonerelay.routing.dns import dnspython_reader
from zonerelay.routing.dns.answers import ParsedAnswer, Record, RecordType, read_plain


def read_alike(packet: bytes, name: str, kind: RecordType[Record]) -> ParsedAnswer[Record] | None:
    """Our reading, after it was found to be dnspython's, or `None`, which is never wrong."""
    theirs = dnspython_reader.read(packet, name, kind)
    try:
        ours = read_plain(packet, name, kind)
    except (ValueError, IndexError, struct.error):
        return None
    # What follows the records may be malformed, or have a code of EDNS: we do not look into it.
    assert ours == theirs or not theirs.status.is_definite, (ours, theirs)
    return ours
