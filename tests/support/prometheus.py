"""A real Prometheus of a test's own: Debian's, unpacked privately, which scrapes once a second."""

import contextlib
import json
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.support.debian import UnpackedPackage, ready_package
from tests.support.ports import LOOPBACK, free_ports
from tests.support.servers import running_server

PROGRAMS = ("usr/bin/prometheus", "usr/bin/promtool")


def unpacked() -> UnpackedPackage:
    return ready_package("prometheus", *PROGRAMS)


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    line = [str(unpacked().path("usr/bin/promtool")), *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)


class Prometheus:
    """`targets`: the address by the name that is the instance. `rules` are evaluated once a second."""

    def __init__(self, directory: Path, targets: Mapping[str, str], rules: Path) -> None:
        directory.mkdir()
        [port] = free_ports(1)
        self._address = f"{LOOPBACK}:{port}"
        self._log = directory / "log"
        scrapes = [{"targets": [address], "labels": {"instance": name}} for name, address in targets.items()]
        config = directory / "prometheus.yml"
        document = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(rules)],
            "scrape_configs": [{"job_name": "zonerelay", "static_configs": scrapes}],
        }
        config.write_text(json.dumps(document))  # which is YAML, too
        self._line = [
            str(unpacked().path("usr/bin/prometheus")),
            f"--config.file={config}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address={self._address}",
            "--log.level=warn",
        ]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with running_server(self._line, self._log, self._is_up):
            yield

    def _is_up(self) -> bool:
        try:
            return bool(self.ask("query", query="1"))
        except OSError:
            return False

    def ask(self, what: str, **parameters: str) -> Any:
        """The data of an answer of the HTTP API. Raises OSError, also for an expression that is wrong."""
        url = f"http://{self._address}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def samples(self, expression: str) -> list[dict[str, str]]:
        """The labels of what the expression gives now."""
        found = self.ask("query", query=expression)
        assert found["resultType"] in ("vector", "scalar")
        return [each["metric"] for each in found["result"]] if found["resultType"] == "vector" else [{}]

    def firing(self) -> dict[tuple[str, str], dict[str, str]]:
        """The annotations of the alerts that fire, by name and instance."""
        return {
            (each["labels"]["alertname"], each["labels"]["instance"]): each["annotations"]
            for each in self.ask("alerts")["alerts"]
            if each["state"] == "firing"
        }
