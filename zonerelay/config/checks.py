"""Checks the configuration file as a whole, and warns about valid settings that may be mistakes.

Each table has its own checks and advice in a module of `tables`. This module calls them in order and adds
those that concern several tables. A check is skipped if one of the values that it compares is already
refused, because its message would be misleading. Advice refuses nothing: `zonerelay check-config` shows it
and the relay logs it at start, one sentence each, in the format of problems: `path.to.key: …`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from zonerelay.config.credentials.secrets import SecretError, is_public, read_secret, secret_path
from zonerelay.config.endpoints import ListenAddress, parse_listen
from zonerelay.config.options import forms
from zonerelay.config.options.options import options_of
from zonerelay.config.problems import Findings, KeyPath, Report, below, path_text
from zonerelay.config.settings import REPEATED, TABLES, Backend, Settings, is_fully_qualified
from zonerelay.config.tables import listener, rewrite, route, store, zone


def check(settings: Settings, report: Report) -> Settings:
    """Check the settings as a whole, record problems in the report, and fill in values that depend on
    others.
    """
    zones, retry, takes_reports = settings.zone, settings.retry, bool(settings.srs.domain)
    # A table that cannot be read may contain what another one needs.
    trusts_dns = settings.dns.trust_ad or not report.sound("dns", "trust_ad")
    has_srs = takes_reports or not report.sound("srs")
    signs = bool(settings.dkim) or not report.sound("dkim")
    if not settings.listener and report.sound("listener"):
        report.refuse(("listener",), "is missing, so no client could submit mail; add a [[listener]]")
    always: dict[str, Callable[[Any], Findings]] = {
        "listener": lambda entry: listener.listener_problems(entry, takes_reports=takes_reports),
        "webhook": store.webhook_problems,
        "zone": lambda entry: chain(
            zone.zone_problems(entry, retry, report, trusts_dns=trusts_dns, signs=signs, has_srs=has_srs),
            zone.login_problems(entry),
        ),
    }
    if_sound: dict[str, Callable[[Any], Findings]] = {
        "access": route.access_problems,
        "route": route.route_problems,
        "rewrite": rewrite.rewrite_problems,
        "credential": zone.credential_problems,
        "dkim": rewrite.dkim_problems,
        "destination": lambda entry: zone.destination_problems(entry, zones, trusts_dns=trusts_dns),
        "spool": store.spool_problems,
        "redis": store.redis_problems,
        "s3": lambda entry: store.s3_problems(entry, settings.spool, settings.workers),
        "outbox": lambda entry: store.outbox_problems(entry, report),
        "capture": store.capture_problems,
        "srs": rewrite.srs_problems,
        "retry": lambda entry: zone.retry_problems(entry, report),
        "admin": store.admin_problems,
    }
    for name, problems_of in (always | if_sound).items():
        for path, entry in _entries(settings, name):
            if name in always or report.sound(*path):
                report.refuse_all(path, problems_of(entry))
    _check_declared(settings, report)
    _check_addresses(settings, report)
    _check_names(settings, report)
    return replace(settings, zone=zone.check_shares(zones, report))


def _check_declared(settings: Settings, report: Report) -> None:
    """Report required options that are missing, and options that have no effect without another one."""
    for table, of in TABLES.items():
        options = {key: each for key, each in options_of(of).items() if each.required or each.needs}
        defaults = of()
        for path, entry in _entries(settings, table) if options else ():
            for key, option in options.items():
                is_given = getattr(entry, key) != getattr(defaults, key)
                other, _, word = option.needs.partition(" = ")
                held = getattr(entry, other) if other else True
                if not report.sound(*path, key) or not report.sound(*path, other):
                    continue
                if option.required and not is_given:
                    from zonerelay.config.options.docstrings import docstrings_of  # noqa: PLC0415 - rare

                    about = docstrings_of(of)[key]
                    report.refuse((*path, key), f"is required: {about[0].lower()}{about[1:].rstrip('.')}")
                elif is_given and (held != word.strip('"') if word else not held):
                    only = f"has an effect only with {option.needs}; set that option, or remove this one"
                    report.refuse((*path, key), only)


def _entries(settings: Settings, name: str) -> Iterator[tuple[KeyPath, Any]]:
    """Yield each table of this name in the settings, with its path."""
    found = getattr(settings, name)
    if name in REPEATED:
        yield from (((name, at), entry) for at, entry in enumerate(found))
    else:
        yield (name,), found


_REFERENCES = (
    ("zone.sources", "source.name", "no [[source]] has this name", "is listed twice; use weight instead"),
    ("zone.credentials", "credential.name", "no [[credential]] has this name", "is listed twice"),
    ("route.zone", "zone.name", "no zone is named", ""),
    ("destination.zone", "zone.name", "no zone is named", ""),
    ("outbox.zone", "zone.name", "no zone is named", ""),
    ("route.listener", "listener.address", "no [[listener]] has the address", ""),
    ("rewrite.listener", "listener.address", "no [[listener]] has the address", ""),
)
"""Options that name other tables: the option, the key that it names, the text of a problem, and the text if a
name is repeated.
"""


def _check_names(settings: Settings, report: Report) -> None:
    """Report duplicate names of tables, and references to tables that do not exist."""
    for table in ("source", "credential", "webhook"):
        report.check_names(table, getattr(settings, table))
    report.refuse_all(("source",), zone.address_problems(settings.source))
    # A zone that could not be read might have the missing name.
    if report.all_sound("zone", "name", len(settings.zone)) and (settings.zone or report.sound("zone")):
        report.check_names("zone", settings.zone)
        zone.check_default_zone(settings.zone, report)
    for option, named, what, twice in _REFERENCES:
        (where, option_key), (table, key) = option.split("."), named.split(".")
        entries = getattr(settings, table)
        # An entry that could not be read might have the missing name.
        if report.all_sound(table, key, len(entries)) and (entries or report.sound(table)):
            known = dict.fromkeys(getattr(each, key) for each in entries)
            for path, entry in _entries(settings, where):
                here, value = (*path, option_key), getattr(entry, option_key)
                if report.given(*path):
                    report.check_references(value, known, what, here, twice=twice)
    for at, each in enumerate(settings.webhook):
        report.check_references(each.events, store.EVENTS, "there is no event", ("webhook", at, "events"))
    zone.check_sources(settings.source, settings.zone, report)
    report.refuse_all(("dkim",), rewrite.record_problems(settings.dkim))


def advice(settings: Settings, hostname: str) -> tuple[str, ...]:
    """Return warnings about settings that are valid but may be mistakes. `hostname` is the result of
    `resolve_hostname`.
    """
    listeners, zones, spool = settings.listener, settings.zone, settings.spool
    found: list[tuple[str, Findings]] = [
        ("spool", store.spool_advice(spool)),
        ("redis", store.redis_advice(settings.redis, spool)),
        ("postgres", store.postgres_advice(settings.postgres, spool, settings.delivery)),
        ("s3", store.s3_advice(settings.s3, spool)),
        ("outbox", store.outbox_advice(settings.outbox, settings.delivery)),
        ("listener", _each(listener.listener_advice, listeners)),
        ("auth", route.auth_advice(settings.auth, listeners)),
        ("access", route.access_advice(settings.access)),
        ("access", _each(lambda rule: listener.users_advice(rule.user, listeners), settings.access)),
        ("zone", _each(zone.zone_advice, zones)),
        ("route", route.route_advice(settings.route, listeners)),
        ("route", _each(lambda rule: listener.users_advice(rule.user, listeners), settings.route)),
        ("rewrite", rewrite.rewrite_advice(settings.rewrite)),
        ("rewrite", _each(lambda rule: listener.users_advice(rule.user, listeners), settings.rewrite)),
        ("srs", rewrite.srs_advice(settings.srs, listeners)),
        ("source", zone.source_advice(settings.source, zones)),
        ("", zone.credential_advice(settings.credential, zones)),
        ("dns", zone.dns_advice(settings.dns)),
        ("destination", zone.destination_advice(settings.destination, zones)),
        ("zone", rewrite.dkim_advice(settings.dkim, zones, hostname)),
        ("retry", zone.shorter_delays(settings.retry.schedule)),
        ("webhook", _each(store.webhook_advice, settings.webhook)),
        ("admin", store.admin_advice(settings.admin)),
    ]
    notes = [
        f"{path_text(below((name,) if name else (), key))}: {text}"
        for name, of_table in found
        for key, text, *_ in of_table
    ]
    if not is_fully_qualified(hostname):
        rejected = "is rejected by many servers; set the fully qualified name of this machine"
        notes.insert(0, f'hostname: the host name "{hostname}" {rejected}')
    return tuple(notes)


def _each(advice_for: Callable[[Any], Findings], entries: Sequence[object]) -> Findings:
    """Yield the warnings about each entry of a repeated table, with the path of the option."""
    for at, entry in enumerate(entries):
        for key, text, *_ in advice_for(entry):
            yield below((at,), key), text


def try_secrets(settings: Settings, environment: Mapping[str, str], report: Report) -> Iterator[str]:
    """Read all secrets, as the relay does at startup. Yield notes about those that are not needed, and refuse
    those that are needed and unusable.
    """
    backend = settings.spool.backend
    needed = {
        "redis": backend is Backend.REDIS,
        "postgres": backend is Backend.POSTGRES,
        "s3": backend is Backend.S3,
        "outbox": bool(settings.outbox.url),
        "srs": bool(settings.srs.domain),
    }
    checks = {"srs": rewrite.check_srs_secret, "webhook": store.check_webhook_key}
    for name in TABLES:
        for path, reference in _secrets_of(settings, name):
            where = path_text(path)
            try:
                secret = read_secret(reference, environment)
                if name in checks and needed.get(name, True):
                    checks[name](reference, secret)
                file = secret_path(reference, environment)
                if file is not None and is_public(file):
                    yield f"{where}: all users of this machine can access {file}; run chmod o-rwx on it"
            except SecretError as error:
                if name == "credential" and not reference.startswith("/"):
                    # The service's credentials need not exist in a terminal.
                    yield f"{where}: cannot be checked outside the service: {error}"
                elif needed.get(name, True):
                    report.refuse(path, str(error))


def _secrets_of(settings: Settings, name: str) -> Iterator[tuple[KeyPath, str]]:
    """Yield each reference to a secret in the tables of this name, with the path of its option."""
    for path, entry in _entries(settings, name):
        for key, option in options_of(TABLES[name]).items():
            value = getattr(entry, key)
            if option.form is forms.secret and option.several:
                yield from (((*path, key, at), place) for at, place in enumerate(value))
            elif option.form is forms.secret and value:
                yield (*path, key), value


def _check_addresses(settings: Settings, report: Report) -> None:
    """Report listeners that have the address of another listener or of the admin port."""
    taken: list[tuple[KeyPath, ListenAddress]] = []
    wanted: list[tuple[KeyPath, str]] = [(("admin", "address"), settings.admin.address)]
    wanted += [(("listener", at, "address"), entry.address) for at, entry in enumerate(settings.listener)]
    for path, text in wanted:
        if not text or not report.sound(*path):
            continue
        address = parse_listen(text)
        other = next((place for place, there in taken if _collide(address, there)), None)
        if other is not None:
            where = "the admin address" if other[0] == "admin" else f"listener[{other[1]}]"
            report.refuse(path, f"{text} is already used by {where}")
        taken.append((path, address))


def _collide(one: ListenAddress, other: ListenAddress) -> bool:
    if one.is_unix or other.is_unix:
        return one == other
    if one.port != other.port or one.port == 0:
        return False
    if "::" in (one.host, other.host):
        return True  # it includes IPv4
    same_family = (":" in one.host) == (":" in other.host)
    return one.host == other.host or (same_family and (one.is_wildcard or other.is_wildcard))
