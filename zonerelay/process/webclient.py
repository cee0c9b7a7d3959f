"""An HTTPS client that fetches MTA-STS policies and access tokens, and posts events.

It is the only user of aiohttp's client, which is imported with the first request, because most relays make
none. Each request uses its own connection (a `Poster` reuses it). There are no cookies, no proxy, no
redirects (the 3xx is the answer) and no decompression. TLS uses the system's authorities (OpenSSL's
SSL_CERT_FILE and SSL_CERT_DIR are honoured) and requires the URL's host in the certificate. `timeout` limits
the whole request, and `max_size` the body.

Every failure is a WebError whose text is for logs: it names the host and the error, never the form, a path or
a query, which may contain secrets.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar
from urllib.parse import urlsplit

import msgspec

from zonerelay.process.files import FileState, file_state, in_words
from zonerelay.process.threads import FILES, addresses_of

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession
    from aiohttp.abc import AbstractResolver

MAX_HEADERS = 100
MAX_HEADER = 8 * 1024  # bytes of one header field, and of the status line
SHOWN = 1024  # bytes of an answer to a post
USER_AGENT = "zonerelay"

Resolve = Callable[[str], Awaitable[Sequence[str]]]
"""A host's IP addresses, most wanted first. Raises WebError, or OSError, when there is none to use."""


class WebError(Exception):
    """The HTTP request failed or has no usable response. The text gives the reason, without secrets."""


class Response(msgspec.Struct, frozen=True):
    """An HTTP response. The names in `headers` are in lower case; of equal ones, the last is kept. The repr
    omits `body`, which may be secret.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes

    def __repr__(self) -> str:
        return f"Response(status={self.status}, {len(self.body)} bytes)"

    @property
    def content_type(self) -> str:
        """The media type in lower case, without parameters, or `""` if there is none."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()


async def fetch(
    url: str,
    *,
    timeout: float,
    max_size: int,
    form: Mapping[str, str] | None = None,
    ssl_context: ssl.SSLContext | None = None,
    resolve: Resolve = addresses_of,
) -> Response:
    """Send a GET request, or a POST request with a url-encoded form. Any status is a response. Raise WebError
    if there is no usable answer.
    """
    async with _limited(url, timeout):
        session = _session(ssl_context or await _trusted(), resolve, force_close=True)
        method = "GET" if form is None else "POST"
        async with session, session.request(method, url, data=form, allow_redirects=False) as response:
            body = bytearray()
            async for piece in response.content.iter_any():
                body += piece
                if len(body) > max_size:
                    raise WebError(f"the response exceeds {max_size} bytes")
            return _response(response, bytes(body))


_Context = TypeVar("_Context", bound=ssl.SSLContext)


def trusting(context: _Context) -> _Context:
    """Set up a client's TLS context to trust the system's certificate authorities, and return it. The
    verification is equally strict with every Python version.

    Reads files, so it blocks.
    """
    # ssl.create_default_context() is stricter with Python 3.13: a private authority's certificates without a
    # key identifier (RFC 5280, section 4.2.1.1) would be refused with some Python versions and accepted with
    # others, and by other relays.
    context.load_default_certs()
    context.hostname_checks_common_name = False  # RFC 9525 2, RFC 8461 3.3
    return context


class SystemTrust(Generic[_Context]):
    """A TLS context with the system's certificate authorities, which is reloaded after they were updated."""

    def __init__(self, make: Callable[[], _Context]) -> None:
        self._make = make
        self._made: tuple[tuple[FileState, ...], _Context] | None = None

    def is_current(self) -> bool:
        return self._made is not None and self._made[0] == _authorities()

    def context(self) -> _Context:
        """Return the current TLS context. If it must be loaded again, files are read, which blocks."""
        if self._made is None or not self.is_current():
            state = _authorities()
            self._made = state, self._make()
        return self._made[1]


TRUST = SystemTrust(lambda: trusting(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)))
"""Of all connections here: a context takes megabytes."""


def _authorities() -> tuple[FileState, ...]:
    paths = ssl.get_default_verify_paths()
    return tuple(file_state(path) for path in (paths.cafile, paths.capath) if path)


async def _trusted() -> ssl.SSLContext:
    return TRUST.context() if TRUST.is_current() else await FILES.run(TRUST.context)


def _session(context: ssl.SSLContext, resolve: Resolve, *, force_close: bool) -> ClientSession:
    import aiohttp  # noqa: PLC0415 - see above

    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            ssl=context,
            resolver=_resolver(resolve),  # aiohttp's uses the loop's default executor
            force_close=force_close,
            use_dns_cache=False,
        ),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),  # the caller limits them
        auto_decompress=False,  # a few bytes could expand to gigabytes
        headers={"User-Agent": USER_AGENT, "Accept-Encoding": "identity"},
        max_line_size=MAX_HEADER,
        max_field_size=MAX_HEADER,
        max_headers=MAX_HEADERS,
    )
    session._retry_connection = False  # the caller decides whether the request is repeated
    return session


@contextlib.asynccontextmanager
async def _limited(url: str, timeout: float) -> AsyncIterator[None]:
    """Limit the duration of a request in the block, and convert its exceptions to WebError."""
    import aiohttp  # noqa: PLC0415 - see above

    host = urlsplit(url).hostname or ""
    try:
        async with asyncio.timeout(timeout):
            yield
    except TimeoutError as error:
        raise WebError(f"{host} did not respond within {timeout:g} s") from error
    except (aiohttp.ClientError, ssl.SSLError, OSError, ValueError) as error:
        raise WebError(_words(error, host)) from error


def _response(response: ClientResponse, body: bytes) -> Response:
    headers = {name.lower(): value for name, value in response.headers.items()}
    return Response(response.status, headers, body)


class Poster:
    """Sends POST requests to one URL repeatedly, and keeps idle connections for a while. Call `close` at the
    end.
    """

    def __init__(self, url: str, *, timeout: float, resolve: Resolve) -> None:
        self._url = url
        self._host = urlsplit(url).hostname or ""
        self._timeout = timeout
        self._resolve = resolve
        self._session: ClientSession | None = None

    async def post(self, body: bytes, headers: Mapping[str, str]) -> Response:
        """Send a POST request. Any status is a response; only the first bytes of its body are read. Raise
        WebError if there is no usable response.
        """
        async with _limited(self._url, self._timeout):
            await self._resolve(self._host)  # no other resolver would be used for an address
            context = await _trusted()
            self._session = self._session or _session(context, self._resolve, force_close=False)
            # A connection that was verified with other authorities is not reused.
            async with self._session.post(
                self._url, data=body, headers=headers, allow_redirects=False, ssl=context
            ) as response:
                return _response(response, await response.content.read(SHOWN))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


def _resolver(resolve: Resolve) -> AbstractResolver:
    from aiohttp.abc import AbstractResolver, ResolveResult  # noqa: PLC0415 - see above

    class Resolver(AbstractResolver):
        """Resolves host names with the given function only, which may reject addresses."""

        async def resolve(
            self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
        ) -> list[ResolveResult]:
            return [
                ResolveResult(
                    hostname=host,
                    host=ip,
                    port=port,
                    family=socket.AF_INET6 if ipaddress.ip_address(ip).version == 6 else socket.AF_INET,
                    proto=socket.IPPROTO_TCP,
                    flags=socket.AI_NUMERICHOST,
                )
                for ip in await resolve(host)
            ]

        async def close(self) -> None:
            """Do nothing: there are no resources to close."""

    return Resolver()


def _words(error: Exception, host: str) -> str:
    """Return an error message for a failed request. The texts of aiohttp's exceptions may quote a URL, so
    they are not used.
    """
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"the certificate of {host} is not trusted: {cause.verify_message}"
    if isinstance(cause, ssl.SSLError):
        return f"TLS with {host} failed: {cause.reason or type(cause).__name__}"
    if isinstance(error, OSError) and isinstance(cause, OSError):  # aiohttp's connection errors are, too
        return f"{host} is unreachable: {in_words(cause)}"
    return f"{host} did not send a valid HTTP response: {type(error).__name__}"
