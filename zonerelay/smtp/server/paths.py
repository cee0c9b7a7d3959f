"""Parses RFC 5321 paths: `<local@domain>`, `<>`, `<postmaster>`. Only this module builds `Mailbox` values.

Strict where the grammar is (brackets, one `@`, no white space, lengths of 4.5.3.1), because a path ends in
logs, in header fields and in the next server's parser. Departures, each for mail that exists:

- dots anywhere in a local part (`john..doe@`, `john.@`, `.john@`): mobile networks have given out such
  addresses, and no receiver is helped by a bounce from here;
- a local part longer than 64 bytes (VERP, SRS, addresses for replies by mail), as long as the path is not:
  RFC 5321 4.5.3.1 wants no limit where none is needed;
- an underscore in a domain (internal hosts have them and DNS allows it);
- white space between the colon and the path, which is skipped by the caller (common clients send it).

Refused although the grammar could be stretched to them:

- source routes `<@a,@b:u@d>`: they ask a relay to find another way than the recipient's domain, which is how
  relays were borrowed (RFC 5321 3.6.1, F.2, lets a server refuse);
- a final dot (`u@example.com.`): not in the grammar, and two spellings of one domain (but see
  `read_leniently`, for clients that may relay);
- an all-numeric last label (`u@192.0.2.1`): an address that lacks its brackets.

Case is kept as sent. Non-ASCII needs SMTPUTF8 (RFC 6531); U-labels are checked for letters, marks and digits
here, and in full (IDNA 2008) when the domain is looked up.
"""

import ipaddress
import re
import unicodedata

from zonerelay.model.envelope import NULL_SENDER, Mailbox
from zonerelay.model.reply import Reply

MAX_DOMAIN = 255
MAX_PATH = 256
MAX_LABEL = 63

_ATEXT = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
# Those and all that is not ASCII, by the characters that are neither: to compile a range up to U+10FFFF
# takes a tenth of a start.
_ATEXT_UTF8 = r"""[^\x00-\x20"(),.:;<>@\[\\\]\x7f]"""
_LABEL = rf"(?!-)[A-Za-z0-9_-]{{1,{MAX_LABEL}}}(?<!-)"

# Nearly every path, at once. The last character is no digit, so that it is no address without its brackets.
_USUAL = re.compile(rf"<({_ATEXT}+(?:\.{_ATEXT}+)*@{_LABEL}(?:\.{_LABEL})*(?<![0-9]))>")
_USUAL_LENGTH = 64
# Finds the end of the path; what is inside is checked piece by piece.
_PATH = re.compile(r'<(@[^<>"]*:)?("(?:[^"\\]|\\.)*"|[^"<>@\[\]]*)(?:@(\[[^\[\]<>]*\]|[^<>@"\[\]]*))?>')
_DOTTED = re.compile(rf"\.*+(?:{_ATEXT}++\.*+)++")
_DOTTED_UTF8 = re.compile(rf"\.*+(?:{_ATEXT_UTF8}++\.*+)++")
_QUOTED = re.compile(r'"(?:[^"\\]|\\[\x20-\x7e])*"')
_DOMAIN = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")


class CommandError(Exception):
    """The command is invalid; `reply` is the reply to the client."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(str(reply))
        self.reply = reply


class PathTooLongError(CommandError):
    """The local part, the domain or the path is longer than RFC 5321 allows."""


def command_error(code: int, detail: str, text: str) -> CommandError:
    return CommandError(Reply(code, detail, text))


_ODD = re.compile(
    r"[^<>]*(?:<[^<>]*)*<[ ]*([^<> ]+?)\.?[ ]*>+"
    r"|(?=[^<> ]++(?: |\Z))([^<> ]+@[^<> ]+?)\.?(?= |\Z)"
)
"""The address within brackets within brackets, with blanks, a display name or a final dot, or without any.
The end of a word is looked for first, because it would otherwise be looked for behind each "@".
"""


def read_leniently(text: str) -> str:
    """Convert a path with invalid syntax, as some devices send it, and return it with the following text."""
    match = _ODD.match(text)
    return text if match is None else f"<{match[1] or match[2]}>{text[match.end() :]}"


def reverse_path(text: str) -> tuple[Mailbox, str]:
    """Parse the sender path of MAIL, and return the address with the following text. `<>` is
    `NULL_SENDER`.
    """
    if text.startswith("<>"):
        return NULL_SENDER, text[2:]
    return _path(text, bad="1.7")


def forward_path(text: str) -> tuple[Mailbox, str]:
    """Parse the recipient path of RCPT, and return the address with the following text. `<postmaster>` needs
    no domain (RFC 5321 4.5.1).
    """
    return _path(text, bad="1.3", bare_postmaster=True)


def require_ascii(mailbox: Mailbox) -> None:
    """Refuse UTF-8 in a transaction that was not declared SMTPUTF8 (RFC 6531 3.5)."""
    if not mailbox.isascii():
        raise command_error(553, "6.7", "Non-ASCII address needs SMTPUTF8")


def _path(text: str, *, bad: str, bare_postmaster: bool = False) -> tuple[Mailbox, str]:
    usual = _USUAL.match(text)
    if usual is not None and len(usual[1]) <= _USUAL_LENGTH:
        return Mailbox(usual[1]), text[usual.end() :]
    match = _PATH.match(text)
    if match is None:
        if not text.startswith("<"):
            raise command_error(501, "5.2", "Address must be enclosed in <>")
        raise command_error(501, bad, "Bad address syntax")
    route, local, domain = match.groups()
    if route is not None:
        raise command_error(553, bad, "Source routes are not supported")
    if domain is None:
        if not (bare_postmaster and local.lower() == "postmaster"):
            raise command_error(501, bad, "Address needs a domain")
        return Mailbox(local), text[match.end() :]
    if not (_is_local_part(local) and _is_domain_part(domain)):
        raise command_error(501, bad, "Bad address syntax")
    mailbox = match[0][1:-1]
    # RFC 5321 4.5.3.1.2 and 3, in octets. The brackets count as part of the path.
    if len(domain.encode()) > MAX_DOMAIN or len(match[0].encode()) > MAX_PATH:
        raise PathTooLongError(Reply(501, bad, "Address too long"))
    return Mailbox(mailbox), text[match.end() :]


def _is_local_part(local: str) -> bool:
    if local.startswith('"'):
        return _QUOTED.fullmatch(local) is not None and local.isprintable()
    if local.isascii():
        return _DOTTED.fullmatch(local) is not None
    return _DOTTED_UTF8.fullmatch(local) is not None and local.isprintable()


def _is_domain_part(domain: str) -> bool:
    if domain.startswith("["):
        return literal_address(domain) is not None
    if not domain.isascii():
        return _is_u_domain(domain)
    return _DOMAIN.fullmatch(domain) is not None and not domain.rpartition(".")[2].isdigit()


def _is_u_domain(domain: str) -> bool:
    return all(
        0 < len(label.encode()) <= MAX_DOMAIN
        and not label.startswith("-")
        and not label.endswith("-")
        and unicodedata.is_normalized("NFC", label)
        and unicodedata.category(label[0])[0] != "M"  # RFC 5891 4.2.3.2: no leading combining mark
        and all(c in "-_" or unicodedata.category(c)[0] in "LMN" for c in label)
        for label in domain.split(".")
    )


def literal_address(domain: str) -> str | None:
    """Return the address in a literal such as `[192.0.2.1]` or `[IPv6:2001:db8::1]`, or `None` for any other
    text (RFC 5321 4.1.3; no other tag was ever registered).
    """
    if not (domain.startswith("[") and domain.endswith("]")):
        return None
    inside = domain[1:-1]
    try:
        if inside[:5].lower() == "ipv6:":
            # A scope such as %eth0 means something on the client's machine, nothing on ours.
            return str(ipaddress.IPv6Address(inside[5:])) if "%" not in inside else None
        return str(ipaddress.IPv4Address(inside))
    except ValueError:
        return None
