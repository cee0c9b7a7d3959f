"""`zonerelay spool check`: reads everything in the spool and its directory, whether or not a relay runs.

The exit status is 0 for a clean spool, 1 for a damaged one, and 2 if a spool cannot be checked.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.text import Text

from zonerelay.cli.relay import load_settings
from zonerelay.cli.spool import home_files
from zonerelay.cli.terminal import output, text
from zonerelay.cli.terminal.exits import FAILED, OK, USAGE, CliError, refused
from zonerelay.config.settings import Settings, SpoolSettings
from zonerelay.store.check import HARMLESS, CheckOptions, Finding, Findings, SpoolContents
from zonerelay.store.contract import StoreError
from zonerelay.store.offline import check_spool
from zonerelay.store.open import place_of_queue
from zonerelay.store.spool_paths import is_shared, spool_of, spools_beyond

MAX_SHOWN = 40
"""Findings in the table; `--json` has a thousand of each kind."""


class SpoolReport(msgspec.Struct, kw_only=True):
    """The result of checking all spools of a configuration. Sizes are in bytes. `findings` has at most a
    thousand of each kind; `counts` counts all of them by kind. `path` is the location of a shared queue.
    """

    backend: str
    path: str
    spools: int
    clean: bool
    messages: int
    deliveries: int
    octets: int
    seconds: float
    counts: dict[str, int]
    findings: list[Finding]


def check(arguments: Namespace) -> int:
    settings = load_settings(arguments.config)
    started = time.monotonic()
    with refused(OSError, status=USAGE):
        workers = [0, *(() if is_shared(settings.spool) else spools_beyond(settings.spool, 1))]
    findings = Findings()
    with output.without_log():
        parts = [_check_one(settings, worker, arguments.tmp, findings) for worker in workers]
    contents = SpoolContents(*map(sum, zip(*parts, strict=True)))
    home_files.check(settings, findings)
    report = SpoolReport(
        backend=settings.spool.backend.value,
        path=place_of_queue(settings) or str(settings.spool.path),
        spools=len(workers),
        clean=not findings.is_damaged,
        **contents._asdict(),
        seconds=round(time.monotonic() - started, 3),
        counts={fault.value: count for fault, count in sorted(findings.counts.items())},
        findings=findings.kept,
    )
    output.print_one(report, _print, as_json=arguments.json)
    return OK if report.clean else FAILED


def _check_one(settings: Settings, worker: int, tmp: Path | None, findings: Findings) -> SpoolContents:
    spool = spool_of(settings.spool, worker)
    name = f"checking {spool.path.name}" if worker else "checking the spool"
    with output.progress(name, octets=True) as reach:
        try:
            examination = CheckOptions(_scratch(spool, tmp), findings, reach, os.environ)
            return asyncio.run(check_spool(settings, worker, examination))
        except (StoreError, OSError) as error:
            place = place_of_queue(settings) or spool.path
            raise CliError(f"{place} cannot be checked: {error}", USAGE) from error


def _scratch(spool: SpoolSettings, tmp: Path | None) -> Path:
    """Return the directory for the scratch copy: next to the spool, where hard links suffice; elsewhere the
    spool is copied.
    """
    place = tmp
    if place is None:
        place = spool.path.parent
        if not os.access(place, os.W_OK | os.X_OK) or os.statvfs(place).f_flag & os.ST_RDONLY:
            place = Path(tempfile.gettempdir())
    return place / f".zonerelay-check-{secrets.token_hex(4)}"


def _print(report: SpoolReport) -> None:
    console = output.console()
    console.print(output.facts(_facts(report)))
    if not report.findings:
        return
    console.print()
    # Damage is listed first.
    shown = sorted(report.findings, key=lambda each: each.fault in HARMLESS)[:MAX_SHOWN]
    rows = ([*map(text.clean, (each.fault.value, each.message_id, each.where, each.what))] for each in shown)
    columns = ("fault", "message", "where", "what")
    console.print(output.table(columns, rows, cut=("where", "what")))
    if (more := sum(report.counts.values()) - len(shown)) > 0:
        console.print(f"… and {more:,} more; --json has a thousand of each kind")


def _facts(report: SpoolReport) -> Iterator[tuple[str, output.Cell]]:
    spools = "" if report.spools == 1 else f" and {report.spools - 1} of other workers"
    yield "spool", f"{report.backend}, {report.path}{spools}"
    yield "state", Text("clean", style="green") if report.clean else Text("damaged", style="bold red")
    yield "messages", f"{report.messages:,}"
    yield "deliveries", f"{report.deliveries:,}"
    rate = report.octets / max(report.seconds, 0.001) / 1e6
    yield "read", f"{text.size(report.octets)} in {report.seconds:.1f} s, {rate:,.0f} MB/s"
    for fault, count in report.counts.items():
        yield fault, f"{count:,}" + ("  (no damage)" if fault in HARMLESS else "")
