"""`cert self-signed`: creates a key and a certificate for a first start, and prints the lines that use them.

Nothing is overwritten without `--force`. With it, each file is replaced atomically, so a running relay reads
the old one or the new one. The key's file is never readable by other users, not even while it is written.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import socket
import sys
from argparse import Namespace
from pathlib import Path

from cryptography import x509

from zonerelay.cli.relay import config_path
from zonerelay.cli.setup.new_files import refuse_existing, write_new
from zonerelay.cli.terminal import output, text
from zonerelay.cli.terminal.exits import OK, USAGE, CliError, refused
from zonerelay.config.load import ConfigError, load
from zonerelay.config.settings import Settings, resolve_hostname
from zonerelay.process.certificate import IssuedCertificate, Name, issue, written
from zonerelay.routing.idna import ascii_domain
from zonerelay.smtp.server.paths import literal_address


def self_signed(arguments: Namespace) -> int:
    given = arguments.name
    if not given:
        name = resolve_hostname(_settings(arguments.config), socket.getfqdn)
        # a machine without a full name reaches itself under both
        given = ["localhost", name] if name.startswith("[") else [name]
    names = [_name(name) for name in given]
    paths = _paths(arguments, written(names[0]))
    if not arguments.force:
        refuse_existing(*paths, hint="--force replaces it")
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
    """Return the settings, or the defaults if the file has errors: it may be incomplete just because this
    certificate does not exist yet.
    """
    try:
        return load(config_path(config))
    except ConfigError:
        output.chatter().print(
            "The configuration has errors (zonerelay check-config); its hostname is not used."
        )
    except CliError:
        pass  # there is no file yet, as at a first start
    return Settings()


def _paths(arguments: Namespace, name: str) -> tuple[Path, Path]:
    """Return the paths of the certificate and the key."""
    certificate, key = arguments.certificate, arguments.key
    if (certificate is None) != (key is None):
        raise CliError("--certificate and --key must be given together", USAGE)
    if certificate is not None:
        if arguments.out is not None:
            raise CliError("--out names the files; use either --out, or --certificate and --key", USAGE)
        if certificate.absolute() == key.absolute():
            raise CliError("--certificate and --key are the same file; use separate files", USAGE)
        return certificate.absolute(), key.absolute()
    stem = name.replace("*", "wildcard").replace(":", "-")
    directory = (arguments.out or Path()).absolute()
    return directory / f"{stem}.pem", directory / f"{stem}.key"


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
