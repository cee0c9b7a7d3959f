"""Defines the context that every store receives when it is opened, reads its secrets, and reports missing
drivers.

On failure: StoreOpenError names the secret or the package that is missing.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import msgspec

from zonerelay.config.credentials.secrets import SecretError, read_secret
from zonerelay.limits.authority import AuthorityError
from zonerelay.model.clock import Clock
from zonerelay.model.delivery import DeliveryKey
from zonerelay.store.contract import KeyRegister, Lost, News, Stored, StoreError, StoreOpenError

_PACKAGES = {"redis": "redis-py", "s3": "aiobotocore", "postgres": "asyncpg"}


class SiblingWorkers(msgspec.Struct, frozen=True):
    """The other workers of the machine, which have their own spools and share idempotency keys. `directory`
    is their shared directory, `worker` the number of this worker, and `all` the workers whose spools may have
    keys. `run` identifies the run of the relay, because a register is valid for one run only.
    """

    directory: Path
    worker: int
    all: frozenset[int]
    run: str


class StoreContext(msgspec.Struct, frozen=True):
    """The settings, callbacks and environment that a store receives when it is opened.

    `on_health` is called with every change of `unhealthy()`, `on_damage` with each new kind of damage,
    `observe_commit` with the duration in seconds of each durable write, `on_stored` with new mail, and
    `on_news` and `on_lost` with changes that other relays make to a shared store. All are called on the event
    loop that opened the store and must not raise. `environment` may contain secrets. `siblings` is `None` for
    a sole worker without keys of removed spools, and on a shared store. On a shared store `register` has the
    idempotency keys of all nodes. `withdraw` stops the scheduler from using deliveries until `give_back`, and
    returns those that may be changed. Without it claimed deliveries may not be changed.
    """

    clock: Clock
    on_health: Callable[[str | None], None] = lambda reason: None
    observe_commit: Callable[[float], None] = lambda seconds: None
    on_damage: Callable[[str], None] = lambda text: None
    on_stored: Stored = lambda deliveries, is_next: 0
    on_news: News = lambda queue: None
    on_lost: Lost = lambda keys: None
    environment: Mapping[str, str] = msgspec.field(default_factory=dict)
    siblings: SiblingWorkers | None = None
    register: KeyRegister | None = None
    withdraw: Callable[[Collection[DeliveryKey]], set[DeliveryKey]] | None = None
    give_back: Callable[[Collection[DeliveryKey]], None] = lambda keys: None


ReadSecret = Callable[[], str]
"""Reads a secret, which may have been replaced since the last connection. Blocks. Raises StoreOpenError."""


def secret_of(option: str, reference: str, environment: Mapping[str, str]) -> ReadSecret:
    """Return a function that reads the secret to which an option refers, for each new connection. It returns
    "" if none is set.
    """

    def read() -> str:
        try:
            return read_secret(reference, environment) if reference else ""
        except SecretError as error:
            raise StoreOpenError(f"{option}: {error}") from error

    return read


@contextlib.contextmanager
def driver(extra: str, *modules: str) -> Iterator[None]:
    """Raise StoreOpenError that names the missing package if the import in the block fails. Every other
    engine works without it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in modules:
            raise
        package = _PACKAGES[extra]
        raise StoreOpenError(
            f"{extra} requires the Python package {package}; in zonerelay's source directory, with the "
            f"relay's own pip, run: pip install -r locks/{extra}.lock"
        ) from error


@contextlib.contextmanager
def authority_errors() -> Iterator[None]:
    """Convert a StoreError in the block to an AuthorityError, for an engine that stores shared limits."""
    try:
        yield
    except StoreError as error:
        raise AuthorityError(str(error)) from error
