"""The settings of a queue in an S3 bucket: [s3]. Import them from `models`."""

# ruff: noqa: RUF009  (the makers return dataclasses.field(), which is what that rule asks for)

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from zonerelay.config.options.options import (
    MINUTE,
    Form,
    choice,
    count,
    duration,
    optional_path,
    switch,
    text,
)


class Addressing(enum.StrEnum):
    AUTO = "auto"
    PATH = "path"
    VIRTUAL = "virtual"


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Settings:
    """[s3]: used when `[spool] backend` says so."""

    bucket: str = text("", "The bucket, which has to exist.")
    prefix: str = text(
        "zonerelay/",
        "What the keys of all objects begin with. Relays with the same bucket and prefix share one queue.",
    )
    endpoint_url: str = text(
        "",
        'The service, if it is not Amazon\'s: "https://s3.example.org". Any that speaks S3, as OpenStack '
        "Swift does with s3api.",
        optional=True,
    )
    region: str = text("", "Its region. Empty: what the environment says, or us-east-1.", optional=True)
    addressing: Addressing = choice(
        Addressing.AUTO,
        "Where the bucket's name goes: path (https://HOST/BUCKET/), virtual (https://BUCKET.HOST/); auto "
        "is path with an endpoint_url and virtual without.",
    )
    access_key: str = text(
        "",
        "The id of the access key. Empty: the environment (AWS_ACCESS_KEY_ID …), the shared files of the "
        "AWS tools, or the role of the machine.",
        optional=True,
    )
    secret_key: str = text(
        "",
        "Where the secret of that key is: a file, env:NAME or credential:NAME.",
        form=Form.SECRET,
    )
    ca_file: Path | None = optional_path("Whose certificates to trust with https; empty: the system's.")
    shared: bool = switch(
        True,
        "Several relays may share the queue. It takes a service with conditional writes, which is tried at "
        "each start. false makes do without them, for one relay alone: a second one is refused.",
    )
    lease: float = duration(
        30.0,
        "How long the mail of this relay stays its own when it is not heard of; then other relays take it "
        "over. Longer than any pause of a relay that is alive.",
        least=1.0,
        most=10 * MINUTE,
    )
    timeout: float = duration(
        10.0, "How long to wait for the service's answer to one request.", most=5 * MINUTE
    )
    max_requests: int = count(50, "Requests to the service at the same time.", most=1000)
    queue_url: str = text(
        "",
        "An SQS queue through which relays tell each other of mail that is left to whoever has room. Empty: "
        "they list the bucket.",
        optional=True,
    )
    queue_endpoint_url: str = text("", "The service of that queue, if it is not Amazon's.", optional=True)
