# mypy: ignore-errors
"""Runs python-slimta: fills a queue, whose relay delivers to some recipients and defers the others.

    python slimta_queue.py redis HOST PORT | disk DIRECTORY

Its disk storage wants pyaio, which no Python of today installs, and all of it an old setuptools: functions of
the system stand in for the two. What is written is written by python-slimta itself. It prints the ids of the
messages.
"""

import importlib.metadata
import os
import sys
import types

import gevent


def aio_write(descriptor, data, offset, done):
    done(os.pwrite(descriptor, data, offset), 0)


def aio_read(descriptor, offset, size, done):
    found = os.pread(descriptor, size, offset)
    done(found, len(found), 0)


def require(name):
    return [types.SimpleNamespace(version=importlib.metadata.version(name))]


sys.modules["pkg_resources"] = types.SimpleNamespace(require=require)
sys.modules["pyaio"] = types.SimpleNamespace(aio_write=aio_write, aio_read=aio_read)

from slimta.envelope import Envelope  # noqa: E402
from slimta.queue import Queue  # noqa: E402
from slimta.relay import Relay, TransientRelayError  # noqa: E402
from slimta.smtp.reply import Reply  # noqa: E402


class SomeRelay(Relay):
    def attempt(self, envelope, attempts):
        busy = TransientRelayError("busy", Reply("450", "4.2.1 mailbox busy"))
        return {each: None if each.startswith("good") else busy for each in envelope.recipients}


def storage():
    if sys.argv[1] == "redis":
        from slimta.redisstorage import RedisStorage

        return RedisStorage(sys.argv[2], int(sys.argv[3]))
    from slimta.diskstorage import DiskStorage

    return DiskStorage(sys.argv[2], sys.argv[2], sys.argv[2])


def envelope(sender, recipients, subject):
    made = Envelope(sender, recipients)
    made.parse(b"From: a@example.org\r\nSubject: " + subject + b"\r\n folded\r\n\r\n.dot \xff\r\nend\r\n")
    made.client = {"ip": "192.0.2.1", "name": "client.example.org", "protocol": "ESMTPA", "auth": "app"}
    made.timestamp = 1700000000.25
    made.receiver = "slimta.example.org"
    made.headers["X-Set"] = "by its own program"
    made.prepend_header("Received", "from client.example.org\r\n\tby slimta.example.org")
    return made


store = storage()
queue = Queue(store, SomeRelay(), backoff=lambda envelope, attempts: 3600)
queue.start()
mail = envelope("a@example.org", ["bad@example.net", "good@example.net", "b\u00fcro@example.net"], b"caf\xe9")
((_, first),) = queue.enqueue(mail)
((_, second),) = queue.enqueue(envelope("", ["bad@example.org"], b"null"))
gevent.sleep(1)
print(first, second)
sys.stdout.flush()
if "wait" in sys.argv:
    gevent.sleep(60)
os._exit(0)
