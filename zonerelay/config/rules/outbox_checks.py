"""[outbox]: what must hold between its options, what follows from them, and its secrets.

No URL is in a text of this module: there might be a password in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from zonerelay.config.credentials.secrets import SecretError, read_secret
from zonerelay.config.options.options import options_of
from zonerelay.config.options.problems import Report
from zonerelay.config.options.wording import did_you_mean, quoted
from zonerelay.config.rules.postgres_checks import is_in_the_open, url_problem
from zonerelay.config.settings import OutboxSettings, Settings

_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]{0,39}")


def check_outbox(settings: Settings, report: Report) -> None:
    outbox = settings.outbox
    if not report.sound("outbox"):
        return
    if not outbox.url:
        others = (key for key in options_of(OutboxSettings) if report.given("outbox", key))
        if not report.given("outbox", "url") and any(others):
            report.refuse(("outbox", "url"), 'is missing: write "postgresql://USER@HOST:5432/DATABASE"')
        return
    if problem := url_problem(outbox.url, "outbox.password"):
        report.refuse(("outbox", "url"), problem)
    for key in ("schema", "table", "mailbox_table"):
        if not _NAME.fullmatch(getattr(outbox, key)):
            report.refuse(("outbox", key), "is a name of letters, digits and _, 40 at most")
    if outbox.table == outbox.mailbox_table:
        report.refuse(("outbox", "mailbox_table"), "is the table of messages already")
    names = [zone.name for zone in settings.zone]
    if outbox.zone not in names and all(report.sound("zone", at, "name") for at in range(len(names))):
        near = did_you_mean(outbox.zone, names)
        report.refuse(("outbox", "zone"), f"no zone is named {quoted(outbox.zone)}{near}")


def try_outbox(settings: Settings, environment: Mapping[str, str], report: Report) -> None:
    """What a start would find out: are the secrets there, and are the keys keys?"""
    outbox = settings.outbox
    if not outbox.url:
        return
    if outbox.password:
        try:
            read_secret(outbox.password, environment)
        except SecretError as error:
            report.refuse(("outbox", "password"), str(error))


def outbox_advice(settings: Settings) -> list[str]:
    outbox = settings.outbox
    if not outbox.url:
        return []
    found = []
    if outbox.lease <= settings.delivery.final_dot_timeout:
        found.append(
            "outbox.lease: not longer than delivery.final_dot_timeout: a message may be sent a second time "
            "while a relay that is cut off from the database still sends it"
        )
    if is_in_the_open(outbox.url):
        found.append(
            "outbox.url: mail goes over the network from whoever answers there: add ?sslmode=verify-full"
        )
    return found
