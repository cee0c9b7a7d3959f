# What zonerelay uses of aiobotocore, which comes without types.
import aiohttp

class AIOHTTPSession:
    _verify: bool | str
    _sessions: dict[str | None, aiohttp.ClientSession]
    async def _get_session(self, proxy_url: str | None) -> aiohttp.ClientSession: ...
