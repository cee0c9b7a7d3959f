"""What strangers, on the network and on the machine, get from a real relay."""

import stat
from pathlib import Path

from tests.support.ports import LOOPBACK, free_ports
from tests.support.process import RelayProcess

UMASK_OF_A_SHELL = ("sh", "-c", 'umask 022; exec "$@"', "sh")


def readable_by_others(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if stat.S_IMODE(path.stat().st_mode) & stat.S_IRWXO]


def test_mail_in_a_directory_that_others_may_enter_is_not_for_them(tmp_path: Path) -> None:
    spool = tmp_path / "relay" / "spool"
    spool.mkdir(mode=0o755, parents=True)
    spool.chmod(0o755)
    nobody = f"{LOOPBACK}:{free_ports(1)[0]}"
    with RelayProcess(tmp_path / "relay", next_hop=nobody, launcher=UMASK_OF_A_SHELL) as relay:
        relay.send("b@example.com")
        assert readable_by_others(spool) == []
        starting = relay.log_text()
        relay.terminate()
        # As a release that did not look left it.
        for path in spool.iterdir():
            path.chmod(0o644)
        relay.restart()
        assert readable_by_others(spool) == []
        assert stat.S_IMODE(spool.stat().st_mode) == 0o755  # the operator's own choice, who is told:
        assert {stat.S_IMODE(path.stat().st_mode) & stat.S_IRGRP for path in spool.glob("*.ldb")} <= {0o040}
        assert f"all users of this machine can list {spool}" in starting
