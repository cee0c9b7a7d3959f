# What zonerelay uses of aiobotocore, which comes without types.
from collections.abc import Mapping

from aiobotocore.httpsession import AIOHTTPSession

class AioConfig:
    def __init__(
        self,
        *,
        s3: Mapping[str, str] = ...,
        retries: Mapping[str, int] = ...,
        connect_timeout: float = ...,
        read_timeout: float = ...,
        max_pool_connections: int = ...,
        request_checksum_calculation: str = ...,
        response_checksum_validation: str = ...,
        user_agent: str = ...,
        parameter_validation: bool = ...,
        http_session_cls: type[AIOHTTPSession] = ...,
    ) -> None: ...
