"""`cert self-signed` creates a key and a self-signed certificate, and prints the configuration for them.
`dkim new` creates a key, and prints its DNS record and its configuration. `dkim check` checks the records in
DNS.

No certificate is overwritten without `--force`. With it, each file is replaced atomically, so a running relay
reads the old one or the new one. A DKIM key is never overwritten, because a key that is in use would be lost.
The file of a key is never readable by other users, not even while it is written.

`dkim check` queries the configured name servers for every key that has not expired, and fails if a record
would invalidate signatures.
"""

import asyncio
import contextlib
import datetime
import enum
import ipaddress
import json
import os
import socket
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from rich.text import Text

from zonerelay.cli.relay import config_path, load_settings
from zonerelay.cli.setup.init import refuse_existing, write_new
from zonerelay.cli.terminal import output, text
from zonerelay.cli.terminal.exits import FAILED, OK, USAGE, CliError, refused
from zonerelay.config.load import load_partial
from zonerelay.config.settings import Settings, read_key_file, read_selector, resolve_hostname
from zonerelay.message.dkim import keys as dkim
from zonerelay.message.dkim.keys import DkimEntry, RecordFinding, RecordStatus
from zonerelay.message.dkim.signature import ED25519, RSA
from zonerelay.model.clock import SystemClock
from zonerelay.process.certificate import IssuedCertificate, Name, issue, written
from zonerelay.routing.addresses import ascii_domain
from zonerelay.routing.dns.answers import TXT, DnsStatus
from zonerelay.routing.dns.resolver import Resolver
from zonerelay.smtp.server.paths import literal_address


def self_signed(arguments: Namespace) -> int:
    given = arguments.name
    if not given:
        name = resolve_hostname(_settings(arguments.config), socket.getfqdn)
        # a machine without a full name reaches itself under both
        given = ["localhost", name] if name.startswith("[") else [name]
    names = [_name(name) for name in given]
    stem = arguments.out.absolute() / written(names[0]).replace("*", "wildcard").replace(":", "-")
    paths = Path(f"{stem}.pem"), Path(f"{stem}.key")
    if not arguments.force:
        refuse_existing(*paths, hint="use --force to replace it")
    issued = issue(names, datetime.datetime.now(datetime.UTC), days=arguments.days)
    write_new(paths[1], issued.key_pem, 0o600)
    write_new(paths[0], issued.certificate_pem, 0o644)
    if arguments.json:
        document = {
            "certificate": str(paths[0]),
            "key": str(paths[1]),
            "names": [written(name) for name in names],
            "expires": issued.certificate.not_valid_after_utc.timestamp(),
            "fingerprint": issued.fingerprint,
        }
        output.print_document(document)
    else:
        _print_text(issued, names, paths)
    return OK


def _name(name: str) -> Name:
    try:
        return x509.IPAddress(ipaddress.ip_address(literal_address(name) or name))
    except ValueError:
        star = "*." if name.startswith("*.") else ""
    with refused(ValueError, before=f"--name {text.clean(name)}: ", status=USAGE):
        return x509.DNSName(star + ascii_domain(name.removeprefix(star)))


def _settings(config: Path | None) -> Settings:
    """Return the valid part of the settings, or the defaults if there is no file yet. The file may be
    incomplete because this certificate does not exist yet.
    """
    with contextlib.suppress(CliError):
        return load_partial(config_path(config)).settings
    return Settings()


def _print_text(issued: IssuedCertificate, names: list[Name], paths: tuple[Path, Path]) -> None:
    console = output.console()
    facts = [
        ("certificate", str(paths[0])),
        ("key", str(paths[1])),
        ("names", ", ".join(map(written, names))),
        ("expires", text.when(issued.certificate.not_valid_after_utc.timestamp())),
        ("SHA-256", issued.fingerprint),
    ]
    console.print(output.facts(facts))
    # A JSON string is also a TOML string. Not printed through the console, which would fold long paths.
    certificate, key = (json.dumps(str(path), ensure_ascii=False) for path in paths)
    lines = ("[[listener]]", 'tls = "starttls"', f"certificate = [{certificate}]", f"key = [{key}]")
    sys.stdout.write("\nIn the configuration:\n\n" + "".join(f"    {line}\n" for line in lines))


# --- dkim ---------------------------------------------------------------------------------------------------

ALGORITHMS = {"rsa": RSA, "ed25519": ED25519}


class KeyActivity(enum.StrEnum):
    """Whether a DKIM key signs mail now, according to its dates."""

    NOW = "now"
    LATER = "later"
    NO_MORE = "no more"


CheckedKey = tuple[DkimEntry, RecordFinding, KeyActivity]


def new(arguments: Namespace) -> int:
    with refused(ValueError, before=f"--domain {text.clean(arguments.domain)}: ", status=USAGE):
        domain = ascii_domain(arguments.domain)
    with refused(ValueError, before="--selector: ", status=USAGE):
        selector = read_selector(arguments.selector)
    path = arguments.out.absolute()
    refuse_existing(path, hint="specify another file, because a key in use would be lost")
    pem = dkim.new_private_key(ALGORITHMS[arguments.algorithm])
    write_new(path, pem.encode("ascii"), 0o600)
    name = dkim.record_name(selector, domain)
    record = dkim.record_text(dkim.load_private_key(pem.encode("ascii")))
    if arguments.json:
        output.print_document(
            {"key_file": str(path), "name": name, "record": record, "strings": dkim.strings(record)}
        )
    else:
        sys.stdout.write(_instructions(domain, selector, path, name, record))
    return OK


def check(arguments: Namespace) -> int:
    settings = load_settings(arguments.config)
    if not settings.dkim:
        output.tell("There is no [[dkim]] key in the configuration.")
        return OK
    with refused(ValueError, status=USAGE):
        keys = dkim.DkimKeys(settings.dkim, read=read_key_file, ascii_domain=ascii_domain)
    now = time.time()
    found = asyncio.run(_look_up(settings, keys.entries))
    rows = [
        (entry, finding, _activity(entry, now)) for entry, finding in zip(keys.entries, found, strict=True)
    ]
    if arguments.json:
        for row in rows:
            output.print_line(_document(*row))
    else:
        output.console().print(_table(rows))
    return FAILED if any(_is_wrong(*row[1:]) for row in rows) else OK


def _instructions(domain: str, selector: str, path: Path, name: str, record: str) -> str:
    """Return the instructions for a new DKIM key, with its DNS record and configuration for copying. A JSON
    string is also a TOML string.
    """
    owner = f"If the relay runs as another user: chown zonerelay {path}\n" if os.geteuid() == 0 else ""
    quoted = "\n".join(f'    "{part}"' for part in dkim.strings(record))
    return f"""\
The key is in {path}, which only its owner can read.
{owner}
1. Publish its DNS record. In a zone file:

{name}. IN TXT (
{quoted}
    )

or in a web form, as a single value:

{record}

2. Add to the configuration:

[[dkim]]
domain = "{domain}"
selector = "{selector}"
key_file = {json.dumps(str(path), ensure_ascii=False)}

3. When the record is visible (zonerelay dkim check), reload the relay.
"""


async def _look_up(settings: Settings, entries: Sequence[DkimEntry]) -> list[RecordFinding]:
    resolver = Resolver(settings.dns, SystemClock())
    try:
        return await asyncio.gather(*(_finding(resolver, entry) for entry in entries))
    finally:
        await resolver.close()


async def _finding(resolver: Resolver, entry: DkimEntry) -> RecordFinding:
    domain = entry.signing_domain or entry.domain
    if domain.startswith("*."):
        detail = "each domain below requires a record; with signing_domain a single record is enough"
        return RecordFinding(RecordStatus.WILDCARD, detail)
    answer = await resolver.lookup(_record_of(entry), TXT)
    if not answer.status.is_definite:
        return RecordFinding(RecordStatus.UNKNOWN, str(answer.status))
    found = dkim.judge(answer.records, entry.key)
    if answer.status is DnsStatus.NXDOMAIN:
        return RecordFinding(found.status, f"the name does not exist: {found.detail}")
    return found


def _activity(entry: DkimEntry, now: float) -> KeyActivity:
    if entry.fits(now):
        return KeyActivity.NOW
    return KeyActivity.LATER if entry.not_before > now else KeyActivity.NO_MORE


def _record_of(entry: DkimEntry) -> str:
    return dkim.record_name(entry.selector, entry.signing_domain or entry.domain)


def _document(entry: DkimEntry, finding: RecordFinding, signs: KeyActivity) -> dict[str, object]:
    """Return the result for one DKIM key as a line of `dkim check --json`. Times are Unix times, 0 if there
    is none.
    """
    return {
        "option": entry.option,
        "domain": entry.domain,
        "selector": entry.selector,
        "algorithm": entry.key.algorithm,
        "bits": entry.key.bits,
        "record": _record_of(entry),
        "signs": signs,
        "status": finding.status,
        "detail": finding.detail,
        "not_before": entry.not_before,
        "not_after": entry.not_after,
    }


def _is_wrong(finding: RecordFinding, signs: KeyActivity) -> bool:
    """Return whether the DNS record of a DKIM key is wrong. The record of an expired key may be absent; a
    failed query counts as wrong.
    """
    return signs is not KeyActivity.NO_MORE and finding.status not in (RecordStatus.OK, RecordStatus.WILDCARD)


@output.tabular(cut=("what is wrong",))
def _table(row: CheckedKey) -> output.Row:
    entry, finding, signs = row
    key = entry.key
    style = "red" if _is_wrong(finding, signs) else "green" if finding.status is RecordStatus.OK else ""
    return {
        "key": entry.option,
        "record": _record_of(entry),
        "algorithm": f"rsa {key.bits}" if key.algorithm == RSA else "ed25519",
        "signs": signs,
        "status": Text(finding.status, style),
        "what is wrong": finding.detail,
    }
