"""What every store is given when it is opened, and how a shared one starts.

Failure: a store that cannot start is closed again, and StoreOpenError says where the trouble is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from zonerelay.config.credentials.secrets import SecretError, read_secret
from zonerelay.model.clock import Clock
from zonerelay.model.delivery import DeliveryKey
from zonerelay.model.queue_name import QueueName
from zonerelay.store.contract import KeyRegister, Lost, News, StoreOpenError

_PACKAGES = {"redis": "redis-py", "s3": "aiobotocore"}


def no_news(queue: QueueName) -> None:
    """The store is private: no other relay leaves mail in it."""


def no_damage(text: str) -> None:
    """The store's own log names the damage."""


def none_lost(keys: Collection[DeliveryKey]) -> None:
    """Claims do not end by themselves."""


@dataclass(frozen=True, slots=True)
class Siblings:
    """The workers of one machine, each with a spool of its own, that answer to the same idempotency keys:
    the `directory` that they share for it, this `worker`, and `all` whose spools may hold keys. `run` names
    the run of the relay, whose register no other one trusts.
    """

    directory: Path
    worker: int
    all: frozenset[int]
    run: str


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The surroundings. `on_health` hears of every change of `unhealthy()`; `on_damage` of each new kind of
    damage that the store meets; `observe_commit` of the seconds of each durable write; `on_news` and
    `on_lost` of what other relays do to a shared store. All are called on the event loop that opened the
    store and must not raise. `environment` is where secrets may be. `siblings` is `None` for a worker that is
    alone and on a shared store; there `register` has the idempotency keys of all nodes. `withdraw` keeps the
    scheduler's hands off deliveries and returns those that may be changed now, until `give_back`; without it
    what is claimed may not be changed.
    """

    clock: Clock
    on_health: Callable[[str | None], None]
    observe_commit: Callable[[float], None]
    on_damage: Callable[[str], None] = no_damage
    on_news: News = no_news
    on_lost: Lost = none_lost
    environment: Mapping[str, str] = field(default_factory=dict)
    siblings: Siblings | None = None
    register: KeyRegister | None = None
    withdraw: Callable[[Collection[DeliveryKey]], set[DeliveryKey]] | None = None
    give_back: Callable[[Collection[DeliveryKey]], None] = none_lost


ReadSecret = Callable[[], str]
"""Reads a secret, which may have been replaced since the last connection. Blocks. Raises StoreOpenError."""


def secret_of(option: str, reference: str, environment: Mapping[str, str]) -> ReadSecret:
    """Returns what reads the secret that an option names at each connection, "" when it names none."""

    def read() -> str:
        try:
            return read_secret(reference, environment) if reference else ""
        except SecretError as error:
            raise StoreOpenError(f"{option}: {error}") from error

    return read


@contextlib.contextmanager
def driver(extra: str, *modules: str) -> Iterator[None]:
    """Says in words which package is missing: without it every other backend works."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in modules:
            raise
        package = _PACKAGES[extra]
        raise StoreOpenError(
            f"[spool] backend: {extra} needs the Python package {package}; in zonerelay's source,"
            f" with the relay's own pip: pip install -r locks/{extra}.lock"
        ) from error
