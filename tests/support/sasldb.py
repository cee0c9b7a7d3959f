"""Users for a private Postfix: Cyrus SASL's own database, by its saslpasswd2 from an unpacked package.

It holds passwords in clear text, as that plugin does: no hash is computed at a log-in.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.support.debian import ready_package

PROGRAM = "usr/sbin/saslpasswd2"
PLUGIN = "usr/lib/*/sasl2/libsasldb.so"


def write_users(
    directory: Path, users: Mapping[str, str], *, realm: str, owner: str, mechanisms: str = "PLAIN LOGIN"
) -> tuple[Path, Path]:
    """The folder with smtpd.conf (cyrus_sasl_config_path), and that of the plugin (for SASL_PATH).

    Raises DebianError when the package cannot be had.
    """
    package = ready_package("sasl2-bin", PROGRAM, PLUGIN, also=("libsasl2-modules-db",))
    folder = directory / "sasl"
    folder.mkdir()
    database = folder / "sasldb2"
    environment = {**os.environ, "LD_LIBRARY_PATH": package.library_path()}
    for name, password in users.items():
        subprocess.run(
            [str(package.path(PROGRAM)), "-p", "-c", "-f", str(database), "-u", realm, name],
            input=password.encode(),
            env=environment,
            check=True,
            capture_output=True,
            timeout=30,
        )
    shutil.chown(database, owner)
    (folder / "smtpd.conf").write_text(
        f"pwcheck_method: auxprop\nauxprop_plugin: sasldb\nsasldb_path: {database}\nmech_list: {mechanisms}\n"
    )
    return folder, package.path(PLUGIN).parent
