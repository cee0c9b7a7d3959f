"""An HTTP receiver of webhooks on loopback, in a thread: it keeps what comes, and answers as told.

with Receiver() as receiver:
    receiver.answers["/hook"] = Answer(503, {"Retry-After": "1"})
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Answer:
    status: int = 204
    headers: Mapping[str, str] = field(default_factory=dict)
    delay: float = 0.0


@dataclass(frozen=True)
class Post:
    path: str
    headers: dict[str, str]
    body: bytes
    status: int
    event: dict[str, Any]  # the test knows what it asks for

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


class Receiver:
    """`posts` has what came in, `taken` the part of it that was answered with 2xx."""

    def __init__(self) -> None:
        self.posts: list[Post] = []
        self.answers: dict[str, Answer] = {}
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                answer = receiver.answers.get(self.path, Answer())
                time.sleep(answer.delay)
                headers = {name.lower(): value for name, value in self.headers.items()}
                receiver.posts.append(Post(self.path, headers, body, answer.status, json.loads(body)))
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                del format, args

        self._server = _Server((LOOPBACK, 0), Handler)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def url(self, path: str = "/hook") -> str:
        return f"http://{LOOPBACK}:{self.port}{path}"

    def taken(self, path: str = "/hook") -> list[Post]:
        return [post for post in list(self.posts) if post.path == path and 200 <= post.status < 300]

    def types(self, path: str = "/hook") -> Counter[str]:
        return Counter(post.event["type"] for post in self.taken(path))

    def about(self, type_: str, path: str = "/hook") -> set[str]:
        """The messages that events of this type have told of."""
        return {post.event["data"]["id"] for post in self.taken(path) if post.event["type"] == type_}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
