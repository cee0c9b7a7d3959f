"""Stores objects in a bucket, using PUT with If-None-Match, or without it for a single relay.

This is the only module that uses aiobotocore. One method sends one request, or a few if the service reports
that it has done nothing. A failed read or listing is repeated, also if a reused connection closes instead of
a response, because S3 answers some requests with 500, as its documentation says. A change is never repeated,
neither here nor by a library, because a late one would overwrite newer data. A PUT without a response may
arrive later, and the log resolves that (`objects`). A versioned bucket keeps a version and a delete marker
for each removed object until a lifecycle rule expires them.

Errors state what is known: `ConflictError` and `MissingError` are answers of the service. After
`UnknownResultError` it is unknown whether the change happened, and the caller must find out.
`RequestRejectedError` means that the service refused. Texts may contain names of keys and messages of the
service, but no secrets and no addresses of people.

A relay that stops tells another one through SQS, if there is a queue for alerts. An alert only triggers a
check of the other partitions, which happens later anyway. So a failure of SQS is logged and has no other
effect.
"""

import asyncio
import contextlib
import functools
import logging
import math
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from aiobotocore.config import AioConfig
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.session import AioSession
from botocore.exceptions import BotoCoreError, ClientError, ConnectionClosedError

from zonerelay import durable
from zonerelay.config.settings import Addressing, S3Settings
from zonerelay.model.clock import Clock
from zonerelay.process.files import FileState, file_state
from zonerelay.process.tasks import Tasks, gathered
from zonerelay.process.threads import FILES
from zonerelay.store.context import ReadSecret, secret_of
from zonerelay.store.contract import StoreError, StoreFullError, StoreLostError, StoreOpenError, Unhealthy
from zonerelay.store.keys.port import MAX_NODES, first_release
from zonerelay.store.objects.engine import AHEAD, Object, ObjectEngine, checked_values
from zonerelay.store.objects.index import ValueLocation

ALERT = '{"left": true}'
BATCH = 10
WAIT = 20
"""Seconds that one request waits for an alert. SQS allows no more."""
ATTEMPTS = 3
"""The number of attempts for requests that the service reports as not done."""
RETRY_PAUSE = 0.1
PAGE_KEYS = 1000
LAST_PATIENCE = 1.0
READ_AGAIN = 10.0
"""Seconds between two searches for credentials in the places of the AWS tools, while requests are denied."""
WINDOW = 1024 * 1024
"""The bytes of a body that one request reads."""
LONGEST_USE = 100.0
"""Seconds, in addition to the timeout, for which a request may use a client."""
SLOWEST = 256 * 1024
"""The lowest expected transfer rate in bytes per second. Large requests are allowed that much more time."""

_BUSY = frozenset(
    {"SlowDown", "503", "ServiceUnavailable", "Throttling", "TooManyRequests", "RequestLimitExceeded"}
)
_NOT_DONE = frozenset({"ConditionalRequestConflict", "OperationAborted"})
_QUESTIONS = frozenset({"get_object", "list_objects_v2"})
_DENIED = frozenset({400, 401, 403})
"""Responses to an unknown or revoked key. The codes differ between services."""
_FULL = frozenset({"QuotaExceeded", "EntityTooLarge", "507", "InsufficientStorage"})

_log = logging.getLogger("zonerelay.store")

T = TypeVar("T")


class UnknownResultError(StoreLostError):
    """The request failed, and it is unknown whether the service carried it out. The change may have
    happened.
    """


class RequestRejectedError(StoreError):
    """The S3 service rejected the request."""


class ConflictError(StoreError):
    """The condition of the request was not met."""


class MissingError(StoreError):
    """The requested object does not exist in the bucket."""


class S3Engine(ObjectEngine):
    """The engine that stores partitions as objects with a common prefix in an S3 bucket. The indexes of this
    process are in a directory below `indexes` that no other process uses. Raises StoreOpenError.
    """

    def __init__(
        self, settings: S3Settings, indexes: Path, clock: Clock, environment: Mapping[str, str]
    ) -> None:
        place = Bucket(settings, secret_of("s3.secret_key", settings.secret_key, environment))
        self._lock: contextlib.ExitStack | None = contextlib.ExitStack()
        index = _free_directory(indexes, self._lock)
        super().__init__(place, index, clock=clock, lease=settings.lease)
        self._ask_queue = place.ask_queue if settings.queue_url else None
        self._is_node = False
        self.check = place.check

    async def wait(self, seconds: float) -> None:
        """Wait until the other partitions should be checked: until another relay sends an alert, or `seconds`
        have passed.
        """
        now = asyncio.get_running_loop().time
        until, self._is_node = now() + seconds, True
        while (left := until - now()) > 0:
            if self._ask_queue is None:
                await asyncio.sleep(left)
                return
            asked = {"MaxNumberOfMessages": BATCH, "WaitTimeSeconds": min(WAIT, math.ceil(left))}
            try:
                heard = (await self._ask_queue("receive_message", **asked)).get("Messages", [])
                for row in heard:
                    await self._ask_queue("delete_message", ReceiptHandle=row["ReceiptHandle"])
            except StoreError as error:
                _log.warning("alerts of other relays cannot be received: %s", error)
                await asyncio.sleep(left)
            else:
                if heard:
                    return

    async def close(self) -> None:
        lock, self._lock = self._lock, None
        if lock is None:
            return
        if self._is_node and self._ask_queue is not None:
            try:
                await self._ask_queue("send_message", MessageBody=ALERT)
            except StoreError as error:
                _log.warning("other relays could not be alerted and will find the mail later: %s", error)
        await super().close()
        lock.close()


def _free_directory(indexes: Path, lock: contextlib.ExitStack) -> Path:
    """Lock an unused index directory, and return it. If it has an index, the log need not be read."""
    try:
        for number in range(MAX_NODES):
            path = indexes / f"{number}"
            with contextlib.suppress(BlockingIOError):
                lock.enter_context(durable.locked_directory(path, patience=0.0))
                return path
    except OSError as error:
        raise StoreOpenError(f"{indexes} cannot be used: {error}") from error
    raise StoreOpenError(f"{indexes}: in use by {MAX_NODES} processes")


@functools.cache
def _descriptions() -> Any:  # Any: botocore has no types
    """Return botocore's loader of service descriptions, which all sessions share. A loader of its own would
    cost each session half a second and 12 MB.
    """
    return AioSession().get_component("data_loader")


@functools.cache
def _session() -> AioSession:
    """Return a session that shares the service descriptions. It is created once, because that takes a tenth
    of a second.
    """
    session = AioSession()
    session.register_component("data_loader", _descriptions())  # type: ignore[attr-defined]  # of botocore
    # Parsing timestamps takes two thirds of the time of a listing, and no caller uses them. The expiry of
    # credentials is then a text too, which the client accepts.
    session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=str)
    return session


class _NoRetrySession(AIOHTTPSession):
    """An HTTP session that does not retry a PUT or a DELETE.

    `ca_file` is loaded again after a change.
    """

    _authorities: FileState = ()

    async def _get_session(self, proxy_url: str | None) -> aiohttp.ClientSession:
        if isinstance(self._verify, str) and (state := file_state(self._verify)) != self._authorities:
            self._authorities = state
            # Requests that use the old sessions continue. The sessions are closed with the client.
            self._sessions.clear()
        session = await super()._get_session(proxy_url)
        session._retry_connection = False
        return session


class Bucket:
    """The objects with one prefix in a bucket, which is opened at the first request. Without an access key
    the client searches for one in the places of the AWS tools.
    """

    def __init__(self, settings: S3Settings, read_secret_key: ReadSecret) -> None:
        self.is_conditional = settings.shared
        self._prefix = settings.prefix
        self._settings = settings
        self._read_secret_key = read_secret_key
        self._secret_key = ""
        self._may_be_old = self._is_closed = False
        self._opened_at = 0.0
        self._opening = asyncio.Lock()
        self._stack = contextlib.AsyncExitStack()
        self._old_clients = Tasks()
        self._client: Any = None  # Any: the methods of a client are created at run time
        self._queue: Any = None  # Any: as above
        self._slots = asyncio.Semaphore(settings.max_requests)

    async def open(self) -> None:
        """Create the S3 client, without sending a request. Raises RequestRejectedError, or StoreOpenError."""
        self._secret_key = await FILES.run(self._read_secret_key)
        self._opened_at = asyncio.get_running_loop().time()
        try:
            async with contextlib.AsyncExitStack() as opened:
                client = await opened.enter_async_context(self._make("s3", self._settings.endpoint_url))
                client.meta.events.register_last("before-call.s3", _without_expect)
                if self._settings.queue_url:
                    made = self._make("sqs", self._settings.queue_endpoint_url)
                    self._queue = await opened.enter_async_context(made)
                stack = opened.pop_all()
        except (BotoCoreError, ValueError) as error:
            raise RequestRejectedError(f"the S3 client library reported an error: {error}") from error
        if self._client is not None:
            self._old_clients.start(self._close_later(self._stack))
        self._client, self._stack = client, stack

    async def _close_later(self, clients: contextlib.AsyncExitStack) -> None:
        """Close replaced clients once no request can be using them, or when the bucket is closed."""
        try:
            await asyncio.sleep(self._settings.timeout + LONGEST_USE)
        finally:
            await clients.aclose()

    def _make(self, service: str, url: str) -> contextlib.AbstractAsyncContextManager[Any]:  # Any: as above
        settings = self._settings
        addressing = settings.addressing
        if addressing is Addressing.AUTO:
            addressing = Addressing.PATH if settings.endpoint_url else Addressing.VIRTUAL
        config = AioConfig(
            s3={"addressing_style": addressing.value},
            # Retries are decided here, because a conditional request must not be repeated.
            retries={"total_max_attempts": 1},
            http_session_cls=_NoRetrySession,
            connect_timeout=settings.timeout,
            read_timeout=settings.timeout + (20.0 if service == "sqs" else 0.0),
            max_pool_connections=settings.max_requests,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            # These options cost time for each request and have no use here.
            user_agent="zonerelay",
            parameter_validation=False,
        )
        return _session().create_client(
            service,
            region_name=settings.region or ("us-east-1" if settings.endpoint_url else None),
            endpoint_url=url or None,
            verify=str(settings.ca_file) if settings.ca_file else None,
            aws_access_key_id=settings.access_key or None,
            aws_secret_access_key=self._secret_key or None,
            config=config,
        )

    async def close(self) -> None:
        self._client, self._is_closed = None, True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_PATIENCE):  # for requests that nobody waits for
                for _ in range(self._settings.max_requests):
                    await self._slots.acquire()
        await self._old_clients.cancel()
        await self._stack.aclose()

    async def _renew_clients(self) -> None:
        """Create the clients, and replace them after the service has denied a request, because the
        credentials may be new.
        """
        async with self._opening:
            if self._client is None and not self._is_closed:
                await self.open()
            if not self._may_be_old:
                return
            self._may_be_old = False
            if self._settings.access_key:
                try:
                    if await FILES.run(self._read_secret_key) == self._secret_key:
                        return
                except StoreOpenError:
                    return  # the file is being replaced; the next denial triggers another attempt
            elif asyncio.get_running_loop().time() < self._opened_at + READ_AGAIN:
                return
            else:
                _session.cache_clear()  # the session caches the credentials
            await self.open()

    # --- objects

    async def create(
        self, name: str, data: bytes, *, values: Sequence[Object] = (), makes_room: bool = False
    ) -> bool:
        await self.store(values)
        condition = {"IfNoneMatch": "*"} if self.is_conditional else {}
        try:
            await self._ask("put_object", Key=self._prefix + name, Body=data, **condition)
        except ConflictError:
            return False
        return True

    async def store(self, values: Sequence[Object]) -> None:
        await _all(lambda value: self.replace(value[0], b"".join(value[1])), values)

    async def replace(self, name: str, data: bytes) -> None:
        await self._ask("put_object", Key=self._prefix + name, Body=data)

    async def read(self, name: str, first: int = 0, length: int = 0) -> bytes | None:
        """Read `length` bytes from `first` on, or the whole object if `length` is 0."""
        part = {"Range": f"bytes={first}-{first + length - 1}"} if length else {}
        with contextlib.suppress(MissingError):
            data: bytes = (await self._ask("get_object", Key=self._prefix + name, **part))["Body"]
            return data
        return None

    async def read_values(self, name: str, spans: Sequence[ValueLocation]) -> list[bytes] | None:
        start, end = spans[0].first, spans[-1].first + spans[-1].size
        data = await self.read(name, start, end - start)
        if data is None:
            return None
        values = [data[each.first - start : each.first - start + each.size] for each in spans]
        return checked_values(values, spans, name)

    async def names(self, prefix: str) -> AsyncIterator[list[str]]:
        more: dict[str, str] = {}
        while True:
            answer = await self._ask(
                "list_objects_v2", Prefix=self._prefix + prefix, MaxKeys=PAGE_KEYS, **more
            )
            yield [row["Key"].removeprefix(self._prefix) for row in answer.get("Contents", [])]
            if not answer.get("IsTruncated"):
                return
            more = {"ContinuationToken": answer["NextContinuationToken"]}

    async def remove(self, names: Sequence[str]) -> None:
        await _all(lambda name: self._ask("delete_object", Key=self._prefix + name), names)

    async def room(self) -> int | None:
        return None

    # --- the requirements of a queue

    async def check(self) -> None:
        """Test the bucket operations that the queue needs. Raises StoreOpenError if the bucket is unsuitable,
        and StoreError if objects cannot be written, read, listed or removed.
        """
        if await self.read("format") is not None:
            raise first_release(f"the prefix {self._prefix}", "another prefix")
        await self._check_versions()
        name = f"probe/{uuid.uuid4().hex}"
        if self.is_conditional:
            await self._try_conditions(name)
        else:
            await self.replace(name, b"12")
        if await self.read(name) != b"12" or await self.read(name, 1, 1) != b"2":
            raise StoreOpenError("the service does not return what was written")
        async for _ in self.names(name):
            break
        await self.remove([name])

    async def _try_conditions(self, name: str) -> None:
        try:
            if not await self.create(name, b"12"):
                raise _unfit("rejects a PUT with If-None-Match: * for a new object")
        except RequestRejectedError as error:
            await self.replace(name, b"12")  # raises if nothing may be written at all
            raise _unfit(f"does not support a PUT with If-None-Match: * ({error})") from error
        if await self.create(name, b"3"):
            raise _unfit("accepts a PUT with If-None-Match: * although the object exists")

    async def _check_versions(self) -> None:
        if "Rule" in (await self._reported("get_object_lock_configuration")).get(
            "ObjectLockConfiguration", {}
        ):
            raise StoreOpenError(
                "the bucket locks every new object (object lock with a default retention), so the queue "
                "could not delete any; use a bucket without it"
            )
        if (await self._reported("get_bucket_versioning")).get("Status") == "Enabled":
            _log.warning(
                "the bucket has versioning enabled: removed objects stay as old versions with delete markers,"
                " and cost money. Add a lifecycle rule that expires noncurrent versions and expired delete"
                " markers after a day (docs/store/s3.md, How to configure the bucket)"
            )

    async def _reported(self, verb: str) -> dict[str, Any]:  # Any: as the service answers
        """Send a request for a property of the bucket, and return {} if it fails, because not every service
        supports it.
        """
        with contextlib.suppress(StoreError):
            return await self._ask(verb)
        return {}

    # --- inside

    async def _ask(self, verb: str, **what: object) -> dict[str, Any]:  # Any: as the service answers
        body = what.get("Body", b"")
        octets = WINDOW if verb == "get_object" else len(body) if isinstance(body, bytes) else 0
        # The client's own timeouts apply to single reads, and not while it waits to write.
        seconds = self._settings.timeout + octets / SLOWEST
        if self._client is None or self._may_be_old:
            await self._renew_clients()
        for attempt in range(1, ATTEMPTS + 1):
            try:
                errors = self._errors(asks=verb in _QUESTIONS)
                async with self._slots, errors, asyncio.timeout(seconds):
                    if self._client is None:
                        raise StoreError(Unhealthy.CLOSED)
                    answer: dict[str, Any] = await getattr(self._client, verb)(
                        Bucket=self._settings.bucket, **what
                    )
                    if verb == "get_object":
                        async with answer["Body"] as stream:
                            answer["Body"] = await stream.read()
                    return answer
            except _RequestFailedError:
                if attempt == ATTEMPTS:
                    raise
                await asyncio.sleep(RETRY_PAUSE * attempt)
        raise AssertionError("the last attempt raises")

    async def ask_queue(self, verb: str, **what: object) -> dict[str, Any]:  # Any: as the service answers
        """Send a request to the queue for alerts."""
        async with self._errors():
            answer: dict[str, Any] = await getattr(self._queue, verb)(
                QueueUrl=self._settings.queue_url, **what
            )
            return answer

    @contextlib.asynccontextmanager
    async def _errors(self, *, asks: bool = False) -> AsyncIterator[None]:
        try:
            yield
        except ClientError as error:
            found: StoreError = _explain(error.response, error.operation_name, asks=asks)
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            self._may_be_old = self._may_be_old or status in _DENIED
        except ConnectionClosedError as error:
            text = f"the object store closed the connection without a response: {error}"
            found = _RequestFailedError(text) if asks else UnknownResultError(text)
        except (BotoCoreError, aiohttp.ClientError, TimeoutError, OSError) as error:
            found = UnknownResultError(f"the object store: {type(error).__name__}: {error}")
        else:
            return
        raise found


def _without_expect(params: dict[str, Any], **_: object) -> None:  # Any: what the client sends
    """Remove the `Expect` header. Waiting for 100 Continue would cost another round trip for each body."""
    params["headers"].pop("Expect", None)


class _RequestFailedError(UnknownResultError):
    """The service did not carry out the request; a later attempt may succeed."""


def _explain(response: dict[str, Any], verb: str, *, asks: bool) -> StoreError:  # Any: as the service answers
    code = str(response.get("Error", {}).get("Code", ""))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    text = str(response.get("Error", {}).get("Message", ""))[:200]
    said = f"the object store returned {status} {code} to {verb}: {text}"
    if code in _BUSY or code in _NOT_DONE or (asks and status >= 500):
        return _RequestFailedError(said)
    if status == 412 or code == "PreconditionFailed":
        return ConflictError(said)
    if code == "NoSuchBucket":
        return RequestRejectedError(said)
    if status in (404, 416):  # it exists, but is shorter
        return MissingError(said)
    if code in _FULL:
        return StoreFullError(said)
    is_unknown = status == 0 or (status >= 500 and status != 501)
    return UnknownResultError(said) if is_unknown else RequestRejectedError(said)


def _unfit(what: str) -> StoreOpenError:
    return StoreOpenError(
        f"the service {what}, so relays cannot share a queue on it; with [s3] shared = false a single "
        "relay can use it"
    )


async def _all(act: Callable[[T], Awaitable[object]], wanted: Sequence[T]) -> None:
    """Call `act` with each argument, several of them concurrently. Raises the first error after all of these
    calls have ended.
    """
    for first in range(0, len(wanted), AHEAD):
        await gathered(map(act, wanted[first : first + AHEAD]))
