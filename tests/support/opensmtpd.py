"""OpenSMTPD as a server that passes on what it takes.

The package is unpacked into `.cache` (see `debian`), never installed. Its places and users are compiled in,
so it runs in a mount namespace of its own, where /var/run (its control socket, else one server at a time),
/var/lib, /var/spool and the lists of users are private. Needs root.

Debian 12's OpenSMTPD 6.8 with OpenSSL 3 offers STARTTLS and breaks every handshake off (it signs in another
process, through an interface that OpenSSL 3 has given up). Debian 13's 7.6 does not.
"""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support import mounts
from tests.support.debian import ready_package
from tests.support.ports import LOOPBACK, free_port, greets
from tests.support.senders import Server
from tests.support.servers import running_server

PROGRAM = "usr/sbin/smtpd"
NAME = "opensmtpd.test"

_SCRIPT = """\
set -e
mount --bind {passwd} /etc/passwd
mount --bind {group} /etc/group
mount -t tmpfs tmpfs "$(readlink -f /var/run)"
mount -t tmpfs tmpfs /var/lib
mkdir -p /var/lib/opensmtpd/empty
mount -t tmpfs tmpfs /var/spool
cd /var/spool
mkdir -p smtpd/offline smtpd/purge smtpd/temporary
chmod 711 smtpd
chown opensmtpq smtpd/purge smtpd/temporary
chmod 700 smtpd/purge smtpd/temporary
chown root:opensmtpq smtpd/offline
chmod 770 smtpd/offline
exec {program} -d -v -f {configuration} -P mda
"""


class OpenSmtpd:
    """`certificate` and `key` make it offer STARTTLS. Its files are below `directory`."""

    def __init__(self, directory: Path, *, certificate: Path | None = None, key: Path | None = None) -> None:
        self._package = ready_package("opensmtpd", PROGRAM)
        self._directory = directory
        self._certificate, self._key = certificate, key
        self.log = directory / "log"
        directory.mkdir(parents=True, exist_ok=True)

    @staticmethod
    def breaks_handshakes() -> bool:
        """Whether this Debian's does: see above."""
        package = ready_package("opensmtpd", PROGRAM)
        return package.version.startswith("6.")

    @contextmanager
    def receiving(self, next_hop: Server) -> Iterator[int]:
        port = free_port()
        self._lay_out(port, next_hop)
        command = [sys.executable, mounts.__file__, "sh", str(self._directory / "run.sh")]
        environment = {
            "LD_LIBRARY_PATH": self._package.library_path(),
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        }
        with running_server(command, self.log, lambda: greets(port), environment=environment):
            yield port

    def _lay_out(self, port: int, next_hop: Server) -> None:
        """All of it private to the namespace: two users that the program insists on among them."""
        directory = self._directory
        passwd, group = directory / "passwd", directory / "group"
        users, groups = Path("/etc/passwd").read_text(), Path("/etc/group").read_text()
        for number, name in ((65501, "opensmtpd"), (65502, "opensmtpq")):
            users += f"{name}:x:{number}:{number}::/var/lib/opensmtpd:/bin/false\n"
            groups += f"{name}:x:{number}:\n"
        passwd.write_text(users)
        group.write_text(groups)
        configuration = directory / "smtpd.conf"
        configuration.write_text(self._configuration(port, next_hop))
        places = {
            "passwd": passwd,
            "group": group,
            "program": self._package.path(PROGRAM),
            "configuration": configuration,
        }
        quoted = {name: shlex.quote(str(place)) for name, place in places.items()}
        (directory / "run.sh").write_text(_SCRIPT.format(**quoted))

    def _configuration(self, port: int, next_hop: Server) -> str:
        tls = pki = ""
        if self._certificate is not None:
            pki = f'pki own cert "{self._certificate}"\npki own key "{self._key}"\n'
            tls = "tls pki own "
        return (
            f"{pki}listen on {LOOPBACK} port {port} {tls}hostname {NAME}\n"
            f'action "on" relay host smtp://{LOOPBACK}:{next_hop.port}\n'
            'match from any for any action "on"\n'
        )
