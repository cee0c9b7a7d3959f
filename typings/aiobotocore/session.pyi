# What zonerelay uses of aiobotocore, which comes without types.
from contextlib import AbstractAsyncContextManager
from typing import Any

from aiobotocore.config import AioConfig

class AioSession:
    def get_component(self, name: str) -> Any: ...  # Any: whatever was registered
    def create_client(
        self,
        service_name: str,
        *,
        region_name: str | None = None,
        endpoint_url: str | None = None,
        verify: str | bool | None = None,
        aws_access_key_id: str | None = None,
        aws_secret_access_key: str | None = None,
        config: AioConfig | None = None,
    ) -> AbstractAsyncContextManager[Any]: ...  # Any: a client's methods are made when it is
