"""The octets of one message, as they were received or as a zone would send them.

The stored body is read piece by piece, so memory holds one. A rendition is the one that the zone's attempts
get (`delivery/rewrite`), and it is kept for them. Every reading is an event that names the person.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from zonerelay.config.settings import ZoneSettings
from zonerelay.delivery.rewrite.rendering import ReadBody, Renderer, RenderError
from zonerelay.model.message_id import MessageId
from zonerelay.operations.answers import BodyPiece, MessageBody
from zonerelay.operations.errors import ControlError
from zonerelay.operations.requests import QueueCat
from zonerelay.queue.aio import closing
from zonerelay.store.contract import MessageNotFoundError, Store


class Bodies:
    """`zone` returns the settings of a zone that is served; `read` is told of the message, the zone ("" for
    the stored body) and the person.
    """

    def __init__(
        self,
        store: Store,
        renderer: Renderer,
        *,
        zone: Callable[[str], ZoneSettings | None],
        read: Callable[[MessageId, str, str], None],
    ) -> None:
        self._store = store
        self._renderer = renderer
        self._zone = zone
        self._read = read

    async def frames(self, request: QueueCat, who: str) -> AsyncGenerator[MessageBody | BodyPiece, None]:
        """Yields what is known of the body, then the body. Raises ControlError and StoreError."""
        message_id, zone = MessageId(request.message_id), ""
        message = await self._store.read_message(message_id)
        read_body: ReadBody = self._store.read_body
        if request.as_sent:
            settings = await self._zone_of(message_id, request.zone)
            zone = settings.name
            try:
                rendered = await self._renderer.render(settings, message)
            except RenderError as error:
                raise ControlError(f"{message_id} is not sent as it is: {error.reply}") from error
            message, read_body = rendered.message, rendered.read_body
        self._read(message_id, zone, who)
        yield MessageBody(message_id=message_id, sender=message.envelope.sender, size=message.size, zone=zone)
        async with closing(read_body(message_id)) as pieces:
            async for piece in pieces:
                yield BodyPiece(octets=piece)

    async def _zone_of(self, message_id: MessageId, wanted: str) -> ZoneSettings:
        names = sorted({delivery.zone for delivery in await self._store.deliveries_of(message_id)})
        if not names:
            raise MessageNotFoundError(f"no delivery of {message_id} is in the queue")
        if wanted and wanted not in names:
            raise ControlError(f"no delivery of {message_id} is in zone {wanted}, but in {', '.join(names)}")
        if not wanted and len(names) > 1:
            raise ControlError(f"{message_id} is in the zones {', '.join(names)}: choose one with --zone")
        name = wanted or names[0]
        settings = self._zone(name)
        if settings is None:
            raise ControlError(f"zone {name} is not configured: the message is not sent at all")
        return settings
