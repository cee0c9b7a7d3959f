"""`python -m tests.bench.memory --minutes 60 --csv FILE [--png FILE]`: the memory of one worker over time.

Two relays run next to each other. The mail of `hanging` is for 200 domains at hosts that never answer: half
of them do not greet, the others are silent after the final dot. The mail of `draining` is delivered at once.
FILE gets a line every ten seconds: time, relay, VmRSS and RssAnon in MB, messages accepted, deliveries in the
queue.
"""

import argparse
import asyncio
import smtplib
import sys
import tempfile
import threading
import time
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from tests.bench.sink import SinkProtocol
from tests.support.dns import FakeDns
from tests.support.meters import sizes
from tests.support.ports import LOOPBACK, free_port
from tests.support.process import RelayProcess

MIB = 1 << 20
DOMAINS = 200
IN_A_SESSION = 1000
SILENT, MUTE = "127.0.0.2", "127.0.0.3"
EVERY = 10.0
BODY = "From: <a@example.org>\r\nSubject: memory\r\n\r\n" + ("0123456789" * 7 + "\r\n") * 56
RATES = {"hanging": 6.0, "draining": 45.0}
"""Messages a second."""


class MuteProtocol(SinkProtocol):
    """A receiver that never replies to the final dot."""

    def _content(self, data: bytes, replies: list[bytes]) -> tuple[bytes, bool]:
        return b"", False


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.memory", description=__doc__)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--png", type=Path)
    options = parser.parse_args()
    if options.minutes:
        with tempfile.TemporaryDirectory(prefix="zonerelay-memory-", dir="/var/tmp") as name:
            uvloop.run(record(Path(name), options.minutes * 60, options.csv))
    if options.png:
        plot(options.csv, options.png)
    return 0


async def record(directory: Path, seconds: float, file: Path) -> None:
    loop, port = asyncio.get_running_loop(), free_port(host="0.0.0.0")
    zones = {f"d{n}.example": {"A": [SILENT if n % 2 else MUTE]} for n in range(DOMAINS)}
    async with AsyncExitStack() as stack:
        dns = await stack.enter_async_context(FakeDns(zones))
        for make, host in (
            (asyncio.Protocol, SILENT),
            (lambda: MuteProtocol(lambda *_: None), MUTE),
            (lambda: SinkProtocol(lambda *_: None), LOOPBACK),
        ):
            await stack.enter_async_context(await loop.create_server(make, host, port, backlog=1000))
        relays = {
            "hanging": RelayProcess(
                directory / "hanging",
                zone={"port": port, "allow_private_addresses": True},
                tables={"dns": {"servers": [dns.address]}},
            ),
            "draining": RelayProcess(directory / "draining", next_hop=f"{LOOPBACK}:{port}"),
        }
        accepted = dict.fromkeys(relays, 0)
        for name, relay in relays.items():
            stack.callback(relay.kill)
            await asyncio.to_thread(relay.start)
            threading.Thread(target=feed, args=(name, relay, accepted), daemon=True).start()
        began = time.monotonic()
        with file.open("w") as out:
            while (at := time.monotonic() - began) < seconds:
                for name, relay in relays.items():
                    shown = await asyncio.to_thread(relay.metrics)
                    queued = sum(value for key, value in shown.items() if "queue_deliveries{" in key)
                    resident, own = (sizes(relay.pid)[each] / MIB for each in ("VmRSS", "RssAnon"))
                    values = f"{at:.0f},{name},{resident:.1f},{own:.1f},{accepted[name]},{queued:.0f}"
                    print(values, file=out, flush=True)
                await asyncio.sleep(began + at + EVERY - time.monotonic())


def feed(name: str, relay: RelayProcess, accepted: dict[str, int]) -> None:
    """Submit at the relay's rate, and connect again after an error."""
    began = time.monotonic()
    while relay.running:
        try:
            with smtplib.SMTP(LOOPBACK, relay.smtp_port, timeout=120) as client:
                for _ in range(IN_A_SESSION):
                    number = accepted[name]
                    client.sendmail("a@example.org", [f"u{number}@d{number % DOMAINS}.example"], BODY)
                    accepted[name] = number + 1
                    time.sleep(max(0.0, began + number / RATES[name] - time.monotonic()))
        except (OSError, smtplib.SMTPException) as error:
            print(f"{name}, message {accepted[name]}: {error!r}", file=sys.stderr, flush=True)
            time.sleep(1.0)


def plot(source: Path, target: Path) -> None:
    from matplotlib import pyplot  # no test needs it

    figure, axes = pyplot.subplots(1, 2, figsize=(13, 4), layout="constrained")
    rows = [line.split(",") for line in source.read_text().splitlines()]
    for place, name in zip(axes, RATES, strict=True):
        at, _, resident, own, accepted, queued = zip(*(row for row in rows if row[1] == name), strict=True)
        minutes = [float(each) / 60 for each in at]
        place.plot(minutes, [*map(float, resident)], label="RSS")
        place.plot(minutes, [*map(float, own)], label="RSS without mapped files")
        place.set(xlabel="minutes", ylabel="MB", ylim=(0, None))
        place.set_title(f"{name}: {int(accepted[-1]):,} messages accepted, {int(queued[-1]):,} in the queue")
        count = place.twinx()
        count.plot(minutes, [*map(int, accepted)], color="grey", linestyle=":", label="accepted (right)")
        count.set(ylabel="messages", ylim=(0, None))
        lines = [*place.get_lines(), *count.get_lines()]
        place.legend(lines, [line.get_label() for line in lines], loc="lower right")
    figure.savefig(target, dpi=80)


if __name__ == "__main__":
    sys.exit(main())
