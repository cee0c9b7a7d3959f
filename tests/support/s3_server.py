"""moto's S3 and SQS server over HTTP, in a process of its own."""

import atexit
import functools
import http.client
import sys
from pathlib import Path

from tests.support.ports import LOOPBACK, free_port, wait_until
from tests.support.servers import ServerProcess

BUCKET = "mail-queue"
KEY = "AKIATEST"
SECRET = "not-a-secret"  # moto takes any


class MotoServer(ServerProcess):
    """What is in it is in memory: it is gone with the process."""

    def __init__(self, *, bind: str = LOOPBACK) -> None:
        self.port = free_port()
        self._bind = bind
        self.url = f"http://{LOOPBACK}:{self.port}"

    def start(self) -> None:
        words = ["-m", "moto.server", "-H", self._bind, "-p", str(self.port)]
        self.spawn([sys.executable, "-W", "ignore", *words], Path("/dev/null"))
        assert wait_until(self._answers, timeout=30), "moto's server does not answer"
        assert self.ask("PUT", f"/{BUCKET}")[0] == 200

    def _answers(self) -> bool:
        try:
            return self.ask("GET", "/moto-api/")[0] == 200
        except OSError:
            return False

    def ask(self, verb: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """One request past every client."""
        connection = http.client.HTTPConnection(LOOPBACK, self.port, timeout=10)
        try:
            signed = {
                "Authorization": f"AWS4-HMAC-SHA256 Credential={KEY}/20260101/us-east-1/s3/aws4_request"
            }
            connection.request(verb, path, body, signed)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def keys(self, prefix: str = "") -> list[str]:
        """Of every object in the bucket, the first thousand."""
        _, listed = self.ask("GET", f"/{BUCKET}?list-type=2&prefix={prefix}")
        return [part.partition(b"</Key>")[0].decode() for part in listed.split(b"<Key>")[1:]]


@functools.cache
def shared_moto() -> MotoServer:
    """One for everybody who brings a prefix of his own; it ends with the test run."""
    server = MotoServer()
    server.start()
    atexit.register(server.__exit__)
    return server
