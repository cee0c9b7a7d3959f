"""The systemd unit and the image fit the relay that they run: names, paths, ports and times agree."""

import ipaddress
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from zonerelay.cli import arguments
from zonerelay.cli.setup.init import PROGRAM
from zonerelay.config.endpoints import parse_listen
from zonerelay.config.load import load
from zonerelay.config.settings import Settings
from zonerelay.config.units import parse_duration
from zonerelay.delivery.auth.logins import token_directory
from zonerelay.routing.mta_sts import policy_directory

ROOT = Path(__file__).parents[2]
CONFIG_EXIT_STATUS = "2"

_SYSTEMD_SECONDS = {"min": 60, "s": 1}


def unit(file: str = "zonerelay.service") -> dict[str, list[str]]:
    """Directives of the unit; one that is written twice has two values."""
    found: dict[str, list[str]] = {}
    for line in (ROOT / "systemd" / file).read_text(encoding="utf-8").splitlines():
        if line and line[0] not in "#[":
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def seconds(value: str) -> float:
    number, unit_name = re.fullmatch(r"(\d+)(min|s)", value).groups()  # type: ignore[union-attr]  # None fails the test
    return int(number) * _SYSTEMD_SECONDS[unit_name]


def dockerfile() -> list[tuple[str, str]]:
    """Instructions and their arguments, continued lines joined, in order."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    instructions = (line.partition(" ") for line in text.splitlines() if line)
    return [(name, " ".join(rest.split())) for name, _, rest in instructions]


def last(instruction: str) -> str:
    return [rest for name, rest in dockerfile() if name == instruction][-1]


@pytest.mark.parametrize(
    ("directive", "value", "reason"),
    [
        ("Type", "notify", "started means listening"),
        ("NotifyAccess", "main", "no other process may speak for the relay"),
        ("Restart", "on-failure", "a crash loses nothing, if something starts it again"),
        ("RestartPreventExitStatus", CONFIG_EXIT_STATUS, "a wrong configuration stays wrong"),
        ("User", "zonerelay", "never root"),
        ("StateDirectory", "zonerelay", "the spool"),
        ("RuntimeDirectory", "zonerelay", "listeners on Unix sockets"),
        ("ConfigurationDirectory", "zonerelay", "the configuration"),
        ("AmbientCapabilities", "CAP_NET_BIND_SERVICE", "port 25"),
        ("CapabilityBoundingSet", "CAP_NET_BIND_SERVICE", "and nothing else"),
        ("NoNewPrivileges", "yes", "no way back to root"),
        ("LimitCORE", "0", "no mail, keys and passwords in a file"),
        ("TasksMax", "2048", "no fork bomb"),
        ("MemoryMax", "75%", "the machine stays usable"),
        ("OOMPolicy", "continue", "the supervisor restarts the worker that was ended"),
        ("ProtectSystem", "strict", "the system is read-only"),
        ("ProtectHome", "yes", "nobody's files"),
        ("PrivateDevices", "yes", "no disks"),
        ("PrivateTmp", "yes", "no file of another service"),
        ("MemoryDenyWriteExecute", "no", "TLS for clients makes code in memory: acceptance/test_no_wx"),
        ("RestrictAddressFamilies", "AF_INET AF_INET6 AF_UNIX AF_NETLINK", "mail, control socket, C library"),
        ("SystemCallArchitectures", "native", "the filter holds for every call"),
    ],
)
def test_the_unit_says(directive: str, value: str, reason: str) -> None:
    assert unit()[directive] == [value], reason


def test_the_system_call_filter_is_a_list_of_what_is_allowed() -> None:
    assert unit()["SystemCallFilter"] == ["@system-service", "~@privileged @resources"]


def test_with_sockets_of_the_service_manager_no_capability_is_left() -> None:
    variant = unit("zonerelay-no-capability.conf")
    assert variant["AmbientCapabilities"] == variant["CapabilityBoundingSet"] == [""]
    assert variant["Requires"] == variant["After"] == ["zonerelay.socket"]


def test_systemd_waits_longer_than_the_relay_drains() -> None:
    assert seconds(unit()["TimeoutStopSec"][0]) >= 2 * Settings().shutdown_timeout


def test_the_watchdog_is_on() -> None:
    assert 10 <= seconds(unit()["WatchdogSec"][0]) <= 300


def test_the_state_directory_holds_the_default_spool() -> None:
    assert Settings().spool.path.parent == Path("/var/lib") / unit()["StateDirectory"][0]


def test_every_command_of_the_unit_is_one_that_zonerelay_has() -> None:
    config = f"/etc/{unit()['ConfigurationDirectory'][0]}/zonerelay.toml"
    (start,), (check, reload) = unit()["ExecStart"], unit()["ExecReload"]
    for line, command in ((start, "serve"), (check, "check-config")):
        program, *rest = shlex.split(line)
        assert program == PROGRAM
        parsed = arguments.parse(rest)
        assert (parsed.command, str(parsed.config)) == (command, config)
    assert reload == "/bin/kill -HUP $MAINPID"


def test_the_user_of_the_unit_is_created() -> None:
    postinst = (ROOT / "debian/postinst").read_text(encoding="utf-8")
    assert re.search(rf"^    useradd --system .*\\\n.* {unit()['User'][0]}$", postinst, re.MULTILINE)


def test_the_container_does_not_run_as_root() -> None:
    names = [name for name, _ in dockerfile()]
    assert last("USER") == "zonerelay"
    assert names.index("USER") < names.index("ENTRYPOINT")
    assert "--uid 2525" in " ".join(rest for name, rest in dockerfile() if name == "RUN")


def test_the_container_runs_a_command_that_zonerelay_has() -> None:
    assert json.loads(last("ENTRYPOINT")) == ["zonerelay"]
    parsed = arguments.parse(json.loads(last("CMD")))
    assert parsed.command == "serve"
    assert last("COPY") == f"config/docker.toml {parsed.config}"
    assert last("STOPSIGNAL") == "SIGTERM"


def test_the_volume_holds_the_spool() -> None:
    assert load(ROOT / "config/docker.toml").spool.path.is_relative_to(last("VOLUME"))


def test_the_container_exposes_what_its_configuration_listens_on() -> None:
    settings = load(ROOT / "config/docker.toml")
    addresses = [parse_listen(listener.address) for listener in settings.listener]
    admin = parse_listen(settings.admin.address)
    assert [int(port) for port in last("EXPOSE").split()] == [
        *(address.port for address in addresses),
        admin.port,
    ]
    assert all(address.is_wildcard for address in (*addresses, admin)), "loopback of a container is no use"
    assert f"http://127.0.0.1:{admin.port}/readyz" in last("HEALTHCHECK")


def test_the_health_check_is_python_that_compiles() -> None:
    command = json.loads(last("HEALTHCHECK").partition("CMD ")[2])
    assert command[:2] == ["python", "-c"]
    compile(command[2], "HEALTHCHECK", "exec")


def test_the_container_relays_for_nobody_until_it_is_told_to() -> None:
    """Docker's proxy makes strangers look like its gateway: no private network is safe by default."""
    for listener in load(ROOT / "config/docker.toml").listener:
        assert all(network.is_loopback for network in listener.allow_networks)
        assert listener.allow_networks == (ipaddress.ip_network("127.0.0.0/8"),)


def test_the_container_drains_before_docker_kills_it() -> None:
    assert load(ROOT / "config/docker.toml").shutdown_timeout < parse_duration("10s")


def test_the_build_context_has_everything_that_is_copied_and_little_else() -> None:
    allowed = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in allowed
    for name, rest in dockerfile():
        if name == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert f"!{source}" in allowed, source


def test_the_wheel_has_every_module() -> None:
    """It takes what is a package, and of other files than Python's those that pyproject.toml names."""
    files = {path for path in (ROOT / "zonerelay").rglob("*") if path.is_file() and path.suffix != ".pyc"}
    modules = {path for path in files if path.suffix == ".py"}
    assert {path.parent for path in modules} == {path.parent for path in files if path.name == "__init__.py"}
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert files - modules == {
        path for each in named["zonerelay"] for path in (ROOT / "zonerelay").glob(each)
    }


def test_what_is_kept_beside_the_spool_is_in_the_state_directory() -> None:
    state = Path("/var/lib") / unit()["StateDirectory"][0]
    for directory in (policy_directory(Settings()), token_directory(Settings())):
        assert directory.parent == state
        assert directory.name in (ROOT / "systemd/zonerelay.service").read_text(encoding="utf-8")


def test_what_the_image_and_make_run_install_is_locked() -> None:
    installs = [rest for name, rest in dockerfile() if name == "RUN" and "pip install" in rest]
    assert [("--require-hashes" in rest, "--no-deps" in rest) for rest in installs] == [
        (True, True),
        (False, True),
    ]
    assert installs[1].endswith("uninstall --yes setuptools pip")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "--require-hashes --no-deps" in makefile
    for file in ("locks/build.lock", "locks/base.lock"):
        assert f"-r {file}" in installs[0]
        assert f"-r {file}" in makefile
    build = (ROOT / "debian/build").read_text(encoding="utf-8")
    locks = {f"locks/{path.name}" for path in (ROOT / "locks").iterdir()} - {"locks/dev.lock"}
    lines = [line for line in build.splitlines() if line.startswith("pip --require-hashes")]
    tool = '"$work/shtab.lock"'  # cut out of dev.lock, for the completion of shells
    assert set(re.findall(r"-r (\S+)", " ".join(lines))) == {*locks, tool}


def locked(name: str) -> dict[str, tuple[Version, Marker | None, list[str]]]:
    """Packages of a lock file: their one version, for which environments, and the hashes of its files."""
    text = (ROOT / "locks" / f"{name}.lock").read_text(encoding="utf-8").replace("\\\n", " ")
    found: dict[str, tuple[Version, Marker | None, list[str]]] = {}
    for line in re.sub(r"^ *#.*\n", "", text, flags=re.MULTILINE).splitlines():
        words, *hashes = line.split(" --hash=")
        requirement = Requirement(words)
        [version] = requirement.specifier
        assert version.operator == "=="
        found[canonicalize_name(requirement.name)] = (Version(version.version), requirement.marker, hashes)
    return found


@pytest.mark.parametrize("extra", ["", "redis", "postgres", "s3", "dev"])
def test_the_lock_has_what_the_project_needs_and_nothing_from_anywhere_else(extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = project["optional-dependencies"][extra] if extra else project["dependencies"]
    packages = locked("base") | (locked(extra) if extra else {}) | locked("build")
    for each in map(Requirement, needed):
        if each.name == project["name"]:  # its other extras
            continue
        version, marker, _ = packages[canonicalize_name(each.name)]
        assert each.specifier.contains(version), each
        assert (marker is None) == (each.marker is None), each
    for name, (_, _, hashes) in packages.items():
        assert hashes, name
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64} *", each) for each in hashes), name
    text = (ROOT / "locks" / f"{extra or 'base'}.lock").read_text(encoding="utf-8")
    assert "://" not in text
    assert "--index" not in text


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_every_python_has_one_binding_to_leveldb(python: str) -> None:
    place = {"python_full_version": f"{python}.0", "python_version": python}
    markers = {name: marker for name, (_, marker, _) in locked("base").items() if "plyvel" in name}
    found = [name for name, marker in markers.items() if marker is not None and marker.evaluate(place)]
    assert found == ["plyvel-ci" if python == "3.11" else "plyvel-next"]


@pytest.mark.parametrize("python", ["3.11.0", "3.12.9", "3.13.0", "3.14.0"])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_nothing_that_is_installed_here_is_left_out_elsewhere(python: str, machine: str) -> None:
    """Without --no-deps pip would add it; with it the relay would not start."""
    place = {"python_full_version": python, "python_version": python[:4], "platform_machine": machine}
    packages = locked("base")
    for name, (_, marker, _) in packages.items():
        if marker is not None and not (marker.evaluate(place) and marker.evaluate()):
            continue  # not for the other Python, or not here and so without metadata
        for line in metadata.requires(name) or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({**place, "extra": ""}):
                assert canonicalize_name(requirement.name) in packages, (name, line)


def test_make_pin_names_the_base_image_by_its_digest_and_invents_none(tmp_path: Path) -> None:
    for file in ("Makefile", "Dockerfile"):
        shutil.copy(ROOT / file, tmp_path)
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()

    def pin(answer: str) -> tuple[int, list[str]]:
        docker.write_text(f"#!/bin/sh\n{answer}\n")
        docker.chmod(0o755)
        environment = {"PATH": f"{docker.parent}:/usr/bin:/bin"}
        done = subprocess.run(
            ["make", "pin"], cwd=tmp_path, env=environment, capture_output=True, check=False
        )
        text = (tmp_path / "Dockerfile").read_text(encoding="utf-8")
        return done.returncode, re.findall(r"^FROM (\S+)", text, re.MULTILINE)

    [(_, [image, _])] = [pin("exit 1")]
    assert pin("exit 1") == (2, [image, image])
    assert pin("echo no such manifest") == (2, [image, image])
    for digit in "a", "b":  # for the first time, and again
        digest = f"sha256:{digit * 64}"
        assert pin(f"echo {digest}") == (0, [f"{image.partition('@')[0]}@{digest}"] * 2)


def test_the_image_has_no_development_packages() -> None:
    installs = [rest for name, rest in dockerfile() if name == "RUN" and "pip install" in rest]
    assert installs
    assert not any("dev]" in rest for rest in installs)


def test_the_image_uses_a_python_that_plyvel_comes_ready_made_for() -> None:
    images = [rest.split()[0] for name, rest in dockerfile() if name == "FROM"]
    names = {image.partition("@")[0] for image in images}
    assert names <= {"python:3.11-slim-bookworm", "python:3.12-slim-bookworm"}
    assert len(set(images)) == 1, "the environment is copied from one stage to the other"
