"""`zonerelay check-config`: prints every problem (exit status 2), or `ok` and notes (0).

Problems go to standard error, the notes to standard output. The command checks the file first. If the file is
valid, it also opens the files and loads the code that the file names.

A problem is added to the report with its key and its line, like the problems of the file itself; advice is
returned as notes. The command imports an operator's code (a policy, a back-off function) and creates the
policy, as a start does. It reads files with the permissions of the user who runs it.

A heavy library is imported only if the configuration needs it: OpenSSL only for TLS.

`zonerelay config show`: prints the options of the file and their defaults as TOML.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import sys
import time
import tomllib
from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from zonerelay.cli.relay import config_path
from zonerelay.cli.terminal import output, text
from zonerelay.cli.terminal.exits import OK, USAGE, refused
from zonerelay.cli.terminal.text import clean_lines
from zonerelay.config import toml_text, user_limits
from zonerelay.config.checks import advice, try_secrets
from zonerelay.config.credentials import file as credentials
from zonerelay.config.credentials.file import CredentialsError
from zonerelay.config.credentials.identities import IdentitiesError, read_token_file
from zonerelay.config.credentials.secrets import SecretError, is_public, read_secret
from zonerelay.config.load import ConfigError, read
from zonerelay.config.problems import KeyPath, Report
from zonerelay.config.settings import Backend, ListenerAuth, ListenerSettings, Settings, resolve_hostname

if TYPE_CHECKING:
    from zonerelay.inbound.tls.certificate_files import CertificatePair


_PATTERNS = (
    ("access", "sender"), ("access", "recipient"), ("route", "sender"), ("route", "recipient"),
    ("destination", "domain"), ("destination", "mx"), ("rewrite", "address"), ("credential", "sender"),
)  # fmt: skip
"""The options that contain patterns of addresses or domains."""


def check_config(arguments: Namespace) -> int:
    return run(config_path(arguments.config))


def run(path: Path) -> int:
    """Check a configuration without changing anything: no directory is created and no socket is opened. Only
    the machine's own name is resolved.
    """
    try:
        settings, report = read(path)
        hostname = resolve_hostname(settings, socket.getfqdn)
        notes = try_out(settings, hostname, report)
        report.raise_problems()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{path}: ok")
    for line in (*advice(settings, hostname), *notes):
        print(f"  note: {line}")
    return 0


def try_out(settings: Settings, hostname: str, report: Report) -> list[str]:
    """Check that the files and objects to which the configuration refers can be used. Add problems to the
    report, and return the notes.
    """
    notes = list[str]()
    for at, listener in enumerate(settings.listener):
        notes += _certificates(listener, ("listener", at), report)
        notes += _policy(listener, hostname, ("listener", at), report)
    notes += _admin(settings, report)
    _users(settings, report)
    notes += _guard_rails(settings, report)
    for table, key in _PATTERNS:
        for at, row in enumerate(getattr(settings, table)):
            _patterns(getattr(row, key), (table, at, key), report)
    for at, rewrite in enumerate(settings.rewrite):
        from zonerelay.inbound.state.transaction import target

        with report.refusing(("rewrite", at, "to"), ValueError):
            target(rewrite.to)
    if settings.retry.backoff:
        from zonerelay.queue.settle.retry import load_backoff

        with report.refusing(("retry", "backoff"), ValueError):
            load_backoff(settings.retry.backoff)
    notes += [*_open_secrets(settings), *try_secrets(settings, os.environ, report)]
    _outbox(settings, report)
    notes += _dkim(settings, report)
    notes += _sources(settings)
    return [*notes, *_rights(settings)]


def _admin(settings: Settings, report: Report) -> Iterator[str]:
    admin = settings.admin
    if admin.token_file is not None:
        with report.refusing(("admin", "token_file"), IdentitiesError):
            read_token_file(admin.token_file)
    if admin.certificate is None:
        return
    from zonerelay.inbound.tls.certificate_files import CertificateError, read_pair

    key = admin.key or admin.certificate
    with report.refusing(("admin", "certificate"), CertificateError):
        pair = read_pair(admin.certificate, key)
        yield from (f"admin.{note}" for note in _about(pair, admin.certificate, key, set()))


def _open_secrets(settings: Settings) -> Iterator[str]:
    """Yield a note for each file of users or tokens that every user of this machine may read."""

    def note(where: str, file: Path | None) -> Iterator[str]:
        with suppress(OSError):  # if the file has to be readable, another check reports it
            if file is not None and is_public(file):
                yield f"{where}: all users of this machine can access {file}; run chmod o-rwx on it"

    if any(each.auth is not ListenerAuth.OFF and not each.authenticator for each in settings.listener):
        yield from note("auth.credentials", settings.auth.credentials)
    yield from note("admin.token_file", settings.admin.token_file)


def _certificates(listener: ListenerSettings, path: KeyPath, report: Report) -> Iterator[str]:
    if not listener.certificate:
        return
    from zonerelay.inbound.tls.certificate_files import CertificateError, KeyFileError, read_pair
    from zonerelay.inbound.tls.certificates import build_context

    names: set[str] = set()
    keys = listener.key or listener.certificate
    for at, (certificate, key) in enumerate(zip(listener.certificate, keys, strict=True)):
        try:
            pair = read_pair(certificate, key)
            build_context([pair], ask_certificate=bool(listener.allow_certificates))
        except CertificateError as error:
            about_key = isinstance(error, KeyFileError) and listener.key
            blamed = (*path, "key" if about_key else "certificate")
            report.refuse((*blamed, at) if report.given(*blamed, at) else blamed, str(error))
        else:
            where = f"{path[0]}[{path[1]}]"
            yield from (f"{where}.{note}" for note in _about(pair, certificate, key, names))
            names.update(pair.names)


def _about(pair: CertificatePair, certificate: Path, key: Path, taken: set[str]) -> Iterator[str]:
    from zonerelay.inbound.tls.certificate_files import is_exposed
    from zonerelay.inbound.tls.certificates import EXPIRES_SOON

    now = time.time()
    if pair.not_after <= now:
        yield f"certificate: {certificate} expired on {text.when(pair.not_after)}"
    elif pair.not_before > now:
        yield f"certificate: {certificate} is not valid before {text.when(pair.not_before)}"
    elif pair.not_after < now + EXPIRES_SOON:
        yield f"certificate: {certificate} expires on {text.when(pair.not_after)}"
    if pair.names and taken.issuperset(pair.names):
        yield f"certificate: {certificate} is never used, because earlier certificates have its names"
    if is_exposed(key):
        yield f"key: all users of this machine can read {key}; run chmod o-r on it"


def _guard_rails(settings: Settings, report: Report) -> Iterator[str]:
    file, path = user_limits.file_beside(settings.auth.credentials), ("auth", "credentials")
    found = None
    with report.refusing(path, CredentialsError):
        found = user_limits.read(file)
    if found is None:
        return
    named: dict[str, user_limits.UserLimits] = {}
    for user in found.users():
        with report.refusing(path, CredentialsError):
            named[f"the user {user}"] = found.own(user)
    for name, each in {**named, "[default]": found.default}.items():
        for problem in _unmatchable(each.recipients):
            report.refuse(path, f"{file}: a recipient of {name}: {problem}")
        zones = {zone.name for zone in settings.zone}
        for zone in each.zones:
            if zone not in zones:
                yield f"auth.credentials: {file}: the zone {zone} of {name} does not exist"
    shared = settings.spool.backend in (Backend.REDIS, Backend.POSTGRES)
    if not shared and any(each.quotas for each in (found.default, *named.values())):
        yield "auth.credentials: user quotas are counted separately on each machine"


def _users(settings: Settings, report: Report) -> None:
    if all(listener.auth is ListenerAuth.OFF or listener.authenticator for listener in settings.listener):
        return
    path: KeyPath = ("auth", "credentials")
    try:
        users = credentials.read(settings.auth.credentials)
    except CredentialsError as error:
        missing = isinstance(error.__cause__, FileNotFoundError)
        hint = "; create it with zonerelay user add" if missing else ""
        report.refuse(path, f"{error}{hint}")
        return
    for user in users.values():
        for problem in _unmatchable(user.senders):
            report.refuse(path, f"{settings.auth.credentials}: user {user.name}, senders: {problem}")


def _patterns(patterns: Iterable[str], path: KeyPath, report: Report) -> None:
    for at, pattern in enumerate(patterns):
        for problem in _unmatchable([pattern]):
            report.refuse((*path, at), problem)


def _unmatchable(patterns: Iterable[str]) -> Iterator[str]:
    from zonerelay.routing.zones.address_patterns import AddressPatterns

    for pattern in patterns:
        try:
            AddressPatterns([pattern])
        except ValueError as error:
            yield f'{error}; expected a pattern such as "user@example.com" or "*.example.com"'


def _policy(listener: ListenerSettings, hostname: str, path: KeyPath, report: Report) -> Iterator[str]:
    if not listener.policy and not listener.authenticator:
        return
    from zonerelay.inbound.policy import PolicyContext
    from zonerelay.inbound.policy.api import WholeMessage
    from zonerelay.inbound.policy.runner import load_authenticator, load_policy

    context = PolicyContext(listener=listener.address, hostname=hostname, file=listener.policy_file)
    if listener.authenticator:
        with report.refusing((*path, "authenticator"), ValueError):
            load_authenticator(listener.authenticator, context)
    policy = None
    with report.refusing((*path, "policy"), ValueError):
        policy = load_policy(listener.policy, context) if listener.policy else None
    if policy is None:
        return
    try:
        closing = policy.close()
        if inspect.isawaitable(closing):
            asyncio.run(asyncio.wait_for(closing, listener.policy_timeout))
    except Exception as error:  # noqa: BLE001 - an operator's code may raise anything
        problem = f"{listener.policy}: close() failed: {type(error).__name__}: {error}"
        report.refuse((*path, "policy"), problem)
    if listener.policy_max_size < listener.max_message_size and hasattr(policy, WholeMessage.step):
        where = f"{path[0]}[{path[1]}].policy_max_size"
        yield (
            f"{where}: the maximum message size is limited to this value because {listener.policy} holds "
            "whole messages in memory (handle_DATA)"
        )


def _outbox(settings: Settings, report: Report) -> None:
    """Check that the encryption keys in `[outbox]` can be read. Do not connect to the database."""
    if not settings.outbox.keys:
        return
    from zonerelay.outbox.database.passwords import PasswordError, read_key

    for at, reference in enumerate(settings.outbox.keys):
        with report.refusing(("outbox", "keys", at), SecretError, PasswordError):
            read_key(read_secret(reference, os.environ))


def _dkim(settings: Settings, report: Report) -> Iterator[str]:
    """Check each DKIM key file, and then the dates of the keys. Yield the notes."""
    if not settings.dkim:
        return
    from zonerelay.config.settings import read_key_file
    from zonerelay.message.dkim.keys import read_key
    from zonerelay.worker.tables import build_dkim_keys

    for at, entry in enumerate(settings.dkim):
        with report.refusing(("dkim", at, "key_file"), ValueError, OSError):
            read_key(entry.key_file, read_key_file)
            if is_public(entry.key_file):
                what = f"all users of this machine can read {entry.key_file}; run chmod o-r on it"
                yield f"dkim[{at}].key_file: {what}"
    if report.sound("dkim"):
        keys = build_dkim_keys(settings)
        assert keys is not None
        yield from keys.advice(time.time())


def _sources(settings: Settings) -> Iterator[str]:
    if not settings.source:
        return
    from zonerelay.routing.addresses import is_address_of_this_machine

    for at, source in enumerate(settings.source):
        for index, ip in enumerate(source.address):
            if not is_address_of_this_machine(ip_address(ip)):
                where = f"source[{at}].address[{index}]"
                yield f"{where}: no interface of this machine has {ip}, so it cannot be used now"


def _rights(settings: Settings) -> Iterator[str]:
    """Yield a note if the files were read as root, because the relay's user may not be able to read them."""
    reads = bool(settings.srs.domain or settings.dkim or settings.credential) or any(
        listener.certificate or listener.auth is not ListenerAuth.OFF or listener.policy_file is not None
        for listener in settings.listener
    )
    if reads and os.geteuid() == 0:
        yield "files were read as root; run this command with sudo -u zonerelay to check the permissions"


def show(arguments: Namespace) -> int:
    """Print the configuration as TOML: all options, only those that were changed, or the defaults. Raise
    CliError with all problems of the file.
    """
    if arguments.defaults:
        document = toml_text.defaults()
    else:
        path = config_path(arguments.config)
        with refused(ConfigError, status=USAGE):
            settings, report = read(path)
        shown = toml_text.changed if arguments.changed else toml_text.effective
        document = f"# {clean_lines(str(path))}\n{shown(settings, report)}"
    if arguments.json:
        output.print_document(tomllib.loads(document))
    else:
        print(document, end="")
    return OK
