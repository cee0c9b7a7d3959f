"""The endpoint of one webhook: sends events as signed POST requests.

Only 2xx is success; 3xx is a failure, because events for one address must not go to another. Addresses that
are not public are refused unless the configuration allows them; this is checked at each connection, because a
name may resolve differently the next time. It never raises, except CancelledError.

Signatures follow Standard Webhooks: HMAC-SHA256 with `whsec_` secrets, ed25519 with `whsk_` secrets. The
signed text is the event's id, the time of the attempt in seconds, and the body, separated by dots. No text or
repr contains a byte of a key.
"""

import base64
import hashlib
import hmac
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

import msgspec

from zonerelay.config.settings import WebhookSettings
from zonerelay.model.clock import Clock
from zonerelay.process.threads import FILES, addresses_of
from zonerelay.process.webclient import Poster, WebError
from zonerelay.routing.addresses import is_private


def signatures(keys: Sequence[str], event_id: str, timestamp: int, body: bytes) -> str:
    """Return the value of the header field `webhook-signature`: a signature with each key, the newest
    first.
    """
    signed = b"%s.%d.%s" % (event_id.encode(), timestamp, body)
    return " ".join(_sign(key, signed) for key in keys)


def _sign(key: str, signed: bytes) -> str:
    kind, _, encoded = key.partition("_")
    octets = base64.b64decode(encoded + "=" * (-len(encoded) % 4))
    if kind == "whsk":
        # A relay that does not sign with ed25519 does not load the library.
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415

        signature = Ed25519PrivateKey.from_private_bytes(octets).sign(signed)
        return f"v1a,{base64.b64encode(signature).decode()}"
    return f"v1,{base64.b64encode(hmac.digest(octets, signed, hashlib.sha256)).decode()}"


_BUSY = frozenset({408, 425, 429, 502, 503, 504})
_LONGEST_WAIT = 24 * 3600.0


class EndpointResponse(msgspec.Struct, frozen=True):
    """The response of a webhook's endpoint to a post. `text` is a human-readable message. `down` means that
    the endpoint would have refused any event; otherwise the reason may be this event. `gone` means that the
    endpoint wants no more events. `wait` is the delay in seconds that it requests.
    """

    ok: bool
    text: str
    down: bool = False
    gone: bool = False
    wait: float = 0.0


@dataclass(eq=False, repr=False)
class Endpoint:
    """The HTTP endpoint of a webhook, to which events are posted. `read_keys` is called before each post and
    returns the signing keys, the newest first, because a secret may have been replaced. It blocks, and raises
    ValueError if a key cannot be read.
    """

    settings: WebhookSettings
    clock: Clock
    read_keys: Callable[[], Sequence[str]]

    def __post_init__(self) -> None:
        self.poster = Poster(self.settings.url, timeout=self.settings.timeout, resolve=self._resolve)

    async def post(self, event_id: str, body: bytes) -> EndpointResponse:
        try:
            keys = await FILES.run(self.read_keys)
        except ValueError as error:
            return EndpointResponse(ok=False, text=str(error), down=True)
        timestamp = int(self.clock.now())
        headers = {
            "Content-Type": "application/json",
            "webhook-id": event_id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": signatures(keys, event_id, timestamp, body),
        }
        try:
            response = await self.poster.post(body, headers)
        except WebError as error:
            return EndpointResponse(ok=False, text=str(error), down=True)
        status = response.status
        return EndpointResponse(
            ok=200 <= status < 300,
            text=f"HTTP {status}",
            down=status in _BUSY,
            gone=status == 410,
            wait=self._wait(response.headers.get("retry-after", "")),
        )

    def _wait(self, text: str) -> float:
        """Parse the field Retry-After (RFC 9110, section 10.2.3): seconds, or a date."""
        try:
            found = (
                float(text)
                if text.isdecimal()
                else parsedate_to_datetime(text).timestamp() - self.clock.now()
            )
        except (ValueError, OverflowError):
            return 0.0
        return min(max(found, 0.0), _LONGEST_WAIT)

    async def _resolve(self, host: str) -> Sequence[str]:
        try:
            addresses = await addresses_of(host)
        except OSError as error:
            raise WebError(f"{host} does not resolve to an address: {error.strerror}") from error
        public = [each for each in addresses if self.settings.private or not is_private(each)]
        if not public:
            raise WebError(
                f"{host} resolves only to private addresses ({', '.join(addresses)}); set private = true "
                "to allow them"
            )
        return public
