"""The certificates that the object store's client trusts are those of its file today."""

from dataclasses import replace
from pathlib import Path

import pytest
import trustme

from tests.store.spools import s3_settings
from tests.support.https import HttpsServer, Page
from zonerelay.store.objects.s3 import Bucket, UnknownResultError


async def test_a_replaced_authority_needs_no_restart(tmp_path: Path) -> None:
    bundle, draft = tmp_path / "bundle.pem", tmp_path / "draft"
    async with HttpsServer(trustme.CA(), "localhost") as server:
        trusted, another = server.trust(tmp_path).read_bytes(), trustme.CA().cert_pem.bytes()
        server.pages["/mail/key"] = Page("found", headers={"ETag": '"a"'})
        bundle.write_bytes(another)
        settings = replace(
            s3_settings(f"https://localhost:{server.port}"),
            bucket="mail",
            prefix="",
            ca_file=bundle,
            timeout=5.0,
        )
        bucket = Bucket(settings, lambda: "secret")
        await bucket.open()
        try:
            for authorities, is_trusted in ((trusted, True), (another, False), (trusted + another, True)):
                draft.write_bytes(authorities)
                draft.replace(bundle)
                if is_trusted:
                    assert await bucket.read("key") == b"found"
                else:
                    with pytest.raises(UnknownResultError):
                        await bucket.read("key")
        finally:
            await bucket.close()
