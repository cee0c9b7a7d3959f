"""Defines metrics as values, which workers send to their supervisor and the control socket returns. It does
not import prometheus-client, which would slow every command down.
"""

from collections.abc import Callable
from operator import add
from typing import NamedTuple

import msgspec

Labels = tuple[tuple[str, str], ...]


class Family(msgspec.Struct, frozen=True, array_like=True):
    """A Prometheus metric family. `samples` are names, labels and numbers in the order in which they are
    exported.
    """

    name: str
    kind: str
    help: str
    samples: tuple[tuple[str, Labels, float], ...]


class ReadMetric(NamedTuple):
    """A metric whose numbers are read from other objects at each scrape. `of` combines the numbers of two
    workers.
    """

    help: str
    labels: tuple[str, ...]
    of: Callable[[float, float], float]


def _read(help_text: str, *labels: str, of: Callable[[float, float], float] = add) -> ReadMetric:
    return ReadMetric(help_text, labels, of)


READ = {
    "zonerelay_config_last_reload_success_timestamp_seconds": _read(
        "Unix time at which the active configuration was loaded.", of=min
    ),
    "zonerelay_config_last_reload_successful": _read(
        "1 if the last load of the configuration file succeeded, otherwise 0.", of=min
    ),
    "zonerelay_queue_deliveries": _read("Deliveries in the queue.", "zone", "state"),
    "zonerelay_queue_oldest_seconds": _read("Age of the oldest delivery in the queue.", "zone", of=max),
    "zonerelay_queue_overdue_seconds": _read(
        "Seconds that have passed since the earliest deferred delivery became due.", "zone", of=max
    ),
    "zonerelay_queue_counting": _read("Workers that are still counting the deliveries in the queue."),
    "zonerelay_outbound_connections": _read("Open connections to peers.", "zone"),
    "zonerelay_loop_lag_longest_seconds": _read(
        "Longest event loop delay of the last one to two minutes.", of=max
    ),
    "zonerelay_user_quota_used_ratio": _read(
        "Used fraction of the most used quota of each user who has sent recently.", "user", of=max
    ),
    "zonerelay_certificate_expiry_timestamp_seconds": _read(
        "Unix time at which a listener's certificate expires.", "name", of=min
    ),
    "zonerelay_orders_without_end": _read("Active suspensions and hold rules without an end time.", of=max),
    "zonerelay_orders": _read("Active suspensions and hold rules, by effect.", "effect", of=max),
    "zonerelay_source_penalties": _read(
        "Destinations at which a source is not used because of its reputation.", "source"
    ),
    # A worker label shows whose disk is full.
    "zonerelay_store_usable": _read("1 if the worker's spool accepts mail, otherwise 0.", "worker"),
    "zonerelay_spool_free_bytes": _read("Free space on the disk of the spool.", "worker"),
    "zonerelay_spool_min_free_bytes": _read("Free space below which no new mail is accepted.", "worker"),
    "zonerelay_captured_messages": _read("Stored captured messages.", of=max),
    "zonerelay_captured_bytes": _read("Disk space used by captured mail.", of=max),
    "zonerelay_destinations": _read(
        "Known destinations with mail or failures, by whether they are suspended.", "zone", "state"
    ),
    "zonerelay_restrained_seconds_total": _read(
        "Time during which backlog and deferred mail was throttled in favour of new mail."
    ),
    "zonerelay_inbound_memory_bytes": _read("Memory used by client connections."),
    "zonerelay_limits_places": _read(
        "Connections under shared limits, by state: held by this worker, used, or wanted.", "zone", "state"
    ),
    "zonerelay_smarthost_login": _read(
        "1 if a credential can log in, otherwise 0.", "zone", "credential", of=min
    ),
    "zonerelay_workers": _read("Workers by state.", "state"),
    "zonerelay_worker_restarts_total": _read("Restarts of workers.", "worker"),
    "zonerelay_webhook_queued": _read("Events queued for a webhook.", "webhook"),
    "zonerelay_outbox_rows": _read("Rows in the outbox.", "status", of=max),
    "zonerelay_outbox_claims_total": _read("Outbox rows claimed by this relay."),
    "zonerelay_outbox_reaped_total": _read("Outbox rows of dead relays returned to the queue."),
    "zonerelay_outbox_lag_seconds": _read("Age of the oldest outbox row that is due.", of=max),
    "zonerelay_outbox_up": _read("1 if the outbox's database is usable, otherwise 0.", of=min),
}
"""The metrics that others keep, by name: counters if it ends in `_total`, otherwise gauges. All workers have
the same suspensions, and count the same table and the same captured mail: of these the greatest number
counts.
"""
