"""Wraps the client of the object store, aiobotocore, and translates its errors.

This is the only module that uses aiobotocore. One method sends one request, or a few if the service reports
that it has done nothing. A failed read or listing is repeated, also if a reused connection closes instead of
a response, because S3 answers some requests with 500, as its documentation says. A change is never repeated,
neither here nor by a library, because a late one would overwrite newer data.

Errors state what is known: `ConflictError` and `MissingError` are answers of the service. After
`UnknownResultError` it is unknown whether the change happened, and the caller must find out.
`RequestRejectedError` means that the service refused. Texts may contain names of keys and messages of the
service, but no secrets and no addresses of people.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from aiobotocore.config import AioConfig
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.session import AioSession
from botocore.exceptions import BotoCoreError, ClientError, ConnectionClosedError

from zonerelay.config.settings import Addressing, S3Settings
from zonerelay.process.files import FileState, file_state
from zonerelay.process.threads import FILES
from zonerelay.store.context import ReadSecret
from zonerelay.store.contract import (
    CHUNK_SIZE,
    StoreError,
    StoreFullError,
    StoreLostError,
    StoreOpenError,
    Unhealthy,
)

ATTEMPTS = 3
"""The number of attempts for requests that the service reports as not done."""
PAUSE = 0.1
PAGE_KEYS = 1000
LAST_PATIENCE = 1.0
READ_AGAIN = 10.0
"""Seconds between two searches for credentials in the places of the AWS tools, while requests are denied."""
WINDOW = 16 * CHUNK_SIZE
"""The bytes of a body that one request reads."""
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


class UnknownResultError(StoreLostError):
    """The request failed, and it is unknown whether the service carried it out. The change may have
    happened.
    """


class RequestRejectedError(StoreError):
    """The service rejected the request."""


class ConflictError(StoreError):
    """The condition of the request was not met."""


class MissingError(StoreError):
    """The object does not exist."""


@functools.cache
def _session() -> AioSession:
    """Return a shared session. Creating one loads the description of the whole service, which takes a tenth
    of a second.
    """
    session = AioSession()
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
    """A bucket of an object store, which is opened at the first request. Without an access key the client
    searches for one in the places of the AWS tools.
    """

    def __init__(self, settings: S3Settings, read_secret_key: ReadSecret) -> None:
        self._settings = settings
        self._read_secret_key = read_secret_key
        self._secret_key = ""
        self._may_be_old = self._is_closed = False
        self._opened_at = 0.0
        self._opening = asyncio.Lock()
        self._stack = contextlib.AsyncExitStack()
        self._client: Any = None  # Any: the methods of a client are created at run time
        self._queue: Any = None  # Any: as above
        self._slots = asyncio.Semaphore(settings.max_requests)

    async def open(self) -> None:
        """Create the client without a request. Raises RequestRejectedError, or StoreOpenError."""
        self._secret_key = await FILES.run(self._read_secret_key)
        self._opened_at = asyncio.get_running_loop().time()
        try:
            made = self._make("s3", self._settings.endpoint_url)
            client = await self._stack.enter_async_context(made)
            client.meta.events.register_last("before-call.s3", _without_expect)
            if self._settings.queue_url:
                made = self._make("sqs", self._settings.queue_endpoint_url)
                self._queue = await self._stack.enter_async_context(made)
            self._client = client
        except (BotoCoreError, ValueError) as error:
            raise RequestRejectedError(f"the object store's client: {error}") from error

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
        await self._stack.aclose()

    async def _renew_clients(self) -> None:
        """Create the clients, also if the service has denied a request and the credentials may have changed
        since. The old ones are closed with the bucket, because their requests may be active.
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

    async def put(self, key: str, data: bytes, *, new: bool = False) -> None:
        """Write an object. With `new` raise ConflictError if it exists."""
        await self._ask("put_object", Key=key, Body=data, **({"IfNoneMatch": "*"} if new else {}))

    async def get(self, key: str, first: int = 0, length: int = 0) -> bytes:
        """Read `length` bytes from `first` on, or the whole object if `length` is 0. Raises MissingError."""
        part = {"Range": f"bytes={first}-{first + length - 1}"} if length else {}
        data: bytes = (await self._ask("get_object", Key=key, **part))["Body"]
        return data

    async def delete(self, key: str) -> None:
        """Remove an object, which need not exist."""
        await self._ask("delete_object", Key=key)

    async def pages(self, prefix: str) -> AsyncIterator[list[str]]:
        """Yield the keys of objects page by page, in order."""
        more: dict[str, str] = {}
        while True:
            answer = await self._ask("list_objects_v2", Prefix=prefix, MaxKeys=PAGE_KEYS, **more)
            yield [row["Key"] for row in answer.get("Contents", [])]
            if not answer.get("IsTruncated"):
                return
            more = {"ContinuationToken": answer["NextContinuationToken"]}

    # --- how the bucket is configured

    async def is_versioned(self) -> bool:
        """Return whether the bucket is versioned. Return false if the service does not report that."""
        with contextlib.suppress(StoreError):
            return (await self._ask("get_bucket_versioning")).get("Status") == "Enabled"
        return False

    async def retention(self) -> bool:
        """Return whether each new object is locked for some time. Return false if the service does not report
        that.
        """
        with contextlib.suppress(StoreError):
            answer = await self._ask("get_object_lock_configuration")
            return "Rule" in answer.get("ObjectLockConfiguration", {})
        return False

    # --- the queue for alerts

    async def send(self, text: str) -> None:
        await self._ask_queue("send_message", MessageBody=text)

    async def receive(self, count: int, wait: int) -> list[tuple[str, str]]:
        """Return received texts, each with the receipt for `forget`."""
        answer = await self._ask_queue("receive_message", MaxNumberOfMessages=count, WaitTimeSeconds=wait)
        return [(row["Body"], row["ReceiptHandle"]) for row in answer.get("Messages", [])]

    async def forget(self, receipt: str) -> None:
        await self._ask_queue("delete_message", ReceiptHandle=receipt)

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
                errors = self._errors(last=attempt == ATTEMPTS, asks=verb in _QUESTIONS)
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
                await asyncio.sleep(PAUSE * attempt)
        raise AssertionError("the last attempt raises")

    async def _ask_queue(self, verb: str, **what: object) -> dict[str, Any]:  # Any: as the service answers
        async with self._errors():
            answer: dict[str, Any] = await getattr(self._queue, verb)(
                QueueUrl=self._settings.queue_url, **what
            )
            return answer

    @contextlib.asynccontextmanager
    async def _errors(self, *, last: bool = True, asks: bool = False) -> AsyncIterator[None]:
        try:
            yield
        except ClientError as error:
            found: StoreError = _explain(error.response, error.operation_name, asks=asks)
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            self._may_be_old = self._may_be_old or status in _DENIED
            if isinstance(found, _RequestFailedError) and last:
                found = UnknownResultError(str(found))
        except ConnectionClosedError as error:
            text = f"the object store closed the connection without a response: {error}"
            found = _RequestFailedError(text) if asks and not last else UnknownResultError(text)
        except (BotoCoreError, aiohttp.ClientError, TimeoutError, OSError) as error:
            found = UnknownResultError(f"the object store: {type(error).__name__}: {error}")
        else:
            return
        raise found


def _without_expect(params: dict[str, Any], **_: object) -> None:  # Any: what the client sends
    """Remove the header Expect. Waiting for 100 Continue would cost another round trip for each body."""
    params["headers"].pop("Expect", None)


class _RequestFailedError(StoreError):
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
