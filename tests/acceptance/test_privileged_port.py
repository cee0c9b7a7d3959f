"""Port 25 needs one capability, or a socket that was opened for the relay, and nothing else that root may.

Shown in a network of its own.
"""

import subprocess
import sys
from pathlib import Path

from tests.support.process import PROGRAM

_BIND = "net_bind_service"
_LOOK = """
import smtplib, subprocess, sys, time
relay = subprocess.Popen(sys.argv[2:], stderr=open(sys.argv[1], "wb"), close_fds=False)
print(next(line for line in open("/proc/self/status") if line.startswith("CapEff")).split()[1])
while relay.poll() is None:
    try:
        with smtplib.SMTP("127.0.0.1", 25, timeout=5) as client:
            print(client.noop()[0], client.sendmail("a@b.example", ["c@d.example"], b"x"))
            relay.terminate()
            break
    except OSError:
        time.sleep(0.1)
print(relay.wait(60))
"""


_HAND_OVER = """
import os, socket, sys
handed = socket.create_server(("127.0.0.1", 25))
os.dup2(handed.fileno(), 3)
os.set_inheritable(3, True)
os.environ |= {"LISTEN_FDS": "1", "LISTEN_FDNAMES": "smtp"}
os.execvp(sys.argv[1], sys.argv[1:])
"""
_HANDED_OVER = ("sh", "-c", 'LISTEN_PID=$$ exec "$@"', "sh")


def test_port_25_takes_the_capability_to_bind_it_and_nothing_else(tmp_path: Path) -> None:
    config = tmp_path / "relay.toml"
    config.write_text(
        f'hostname = "relay.test"\nworkers = 2\n[spool]\npath = "{tmp_path}/home/spool"\nmin_free_space = 0\n'
        '[[listener]]\naddress = "127.0.0.1:25"\n[[zone]]\nname = "default"\nnext_hop = "127.0.0.1:1"\n'
        '[admin]\naddress = ""\n'
    )
    assert _limited_to(f"-all,+{_BIND}", config) == ["0000000000000400", "250 {}", "0"]
    assert _limited_to("-all", config) == ["0000000000000000", "1"]
    assert "a port below 1024 requires CAP_NET_BIND_SERVICE" in (tmp_path / "log").read_text()
    assert _limited_to("-all", config, handed=True) == ["0000000000000000", "250 {}", "0"]


def _limited_to(capabilities: str, config: Path, *, handed: bool = False) -> list[str]:
    """What a relay does that has no other capabilities, though its user is root (capabilities(7), noroot)."""
    sets = ["--inh-caps", capabilities, "--ambient-caps", capabilities, "--bounding-set", f"-all,+{_BIND}"]
    drop = ["setpriv", *sets, "--securebits", "+noroot", "--no-new-privs"]
    relay = [*(_HANDED_OVER if handed else ()), str(PROGRAM), "serve", "--config", str(config)]
    hand_over = [sys.executable, "-c", _HAND_OVER] if handed else []
    look = [sys.executable, "-c", _LOOK, str(config.parent / "log"), *relay]
    # In a new network net.ipv4.ip_unprivileged_port_start is 1024, whatever the host's is.
    inside = [
        "unshare",
        "--net",
        "sh",
        "-c",
        'ip link set lo up && exec "$@"',
        "sh",
        *hand_over,
        *drop,
        *look,
    ]
    done = subprocess.run(inside, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
