"""Debian's own programs with our sendmail(1): cron, PHP, git, mutt and mailx, in a Debian of their own."""

import shutil
from pathlib import Path
from typing import NamedTuple

from tests.support.chroot import Chroot
from tests.support.debian import ready_package
from tests.support.ports import LOOPBACK
from tests.support.process import RelayProcess
from tests.support.sink import Sink

ROOT = Path(__file__).parents[2]
MODULES = ("__init__", "sendmail", "model/__init__", "model/address_list")
PROGRAM = "#!/usr/bin/python3 -I\nimport sys\nfrom zonerelay.sendmail import main\nsys.exit(main())\n"
HERE = "debian.example"


class Case(NamedTuple):
    """`fields` are lines of the header."""

    command: str
    sender: str
    recipients: list[str]
    fields: list[str]


REPOSITORY = (
    "mkdir /tmp/g && cd /tmp/g && git init -q . && git config user.email me@b.example && "
    "git config user.name 'Me, (Foo) Müller' && echo a > a && git add a && "
    "git commit -qm 'one\n\nReported-by: Bob [x] <bob@d.example>\nCc: stable@d.example # 6.1+' && "
)
CASES = {
    "cron": Case(
        "rm -f /run/crond.reboot; printf '@reboot root echo x\\n' > /etc/cron.d/x; timeout 5 cron -f; true",
        f"root@{HERE}",
        ["ops@d.example"],
        [f"From: root@{HERE} (Cron Daemon)", f"To: root@{HERE}"],
    ),
    "PHP": Case(
        "php -r 'exit(mail(\"Shop [Sales] <s@d.example>, a@d.example <a@d.example>\", \"x\", \"hello\", "
        '"From: WP <wp@b.example>\\r\\nBcc: hid@d.example", "-fwp@b.example") ? 0 : 1);\'',
        "wp@b.example",
        ["a@d.example", "hid@d.example", "s@d.example"],
        ["From: WP <wp@b.example>", "To: Shop [Sales] <s@d.example>, a@d.example <a@d.example>"],
    ),
    "git send-email": Case(
        f"{REPOSITORY} git -c sendemail.envelopesender=me@b.example send-email --quiet --confirm=never"
        " --to='L <l@d.example>' --cc='A (x, y) <a@d.example>' --bcc=hid@d.example -1",
        "me@b.example",
        ["a@d.example", "bob@d.example", "hid@d.example", "l@d.example", "me@b.example", "stable@d.example"],
        ["To: L <l@d.example>"],
    ),
    "mutt": Case(
        "echo hello | mutt -s x -b hid@d.example -c '\"C, D\" <c@d.example>' -- 'Ann (x) <a@d.example>'",
        f"root@{HERE}",
        ["a@d.example", "c@d.example", "hid@d.example"],
        ["To: Ann <a@d.example>", 'Cc: "C, D" <c@d.example>'],
    ),
    "mailx": Case(
        "echo x | s-nail -s x -S mta=/usr/sbin/sendmail -b hid@d.example -r 'Me <me@b.example>' a@d.example",
        "me@b.example",
        ["a@d.example", "hid@d.example"],
        ["From: Me <me@b.example>", "To: a@d.example"],
    ),
}  # fmt: skip


def install(root: Path) -> None:
    """The sendmail of the package zonerelay-sendmail, and the module of Perl that git-email needs."""
    package = root / "usr/lib/python3/dist-packages/zonerelay"
    (package / "model").mkdir(parents=True)
    for name in MODULES:
        (package / f"{name}.py").write_bytes((ROOT / "zonerelay" / f"{name}.py").read_bytes())
    program = root / "usr/sbin/sendmail"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    (root / "etc/mailname").write_text(f"{HERE}\n")
    (root / "etc/aliases").write_text("root: ops@d.example\n")
    perl = ready_package("libmailtools-perl", "usr/share/perl5/Mail/Address.pm")
    shutil.copytree(perl.root / "usr/share/perl5/Mail", root / "usr/share/perl5/Mail")


def test_programs_of_debian_reach_whom_they_mean(tmp_path: Path, sink: Sink) -> None:
    machine = Chroot(tmp_path / "root")
    install(machine.root)
    with RelayProcess(tmp_path / "relay", next_hop=f"{LOOPBACK}:{sink.port}") as relay:
        (machine.root / "etc/zonerelay").mkdir()
        config = f'[[listener]]\naddress = "{LOOPBACK}:{relay.smtp_port}"\n'
        (machine.root / "etc/zonerelay/zonerelay.toml").write_text(config)
        for what, case in CASES.items():
            sink.messages.clear()
            said = machine.run("sh", "-c", case.command)
            assert sink.until_recipients(len(case.recipients)) == case.recipients, (what, said)
            assert relay.events("accepted")[-1]["recipients"] == len(case.recipients), what
            assert {each.mail_from for each in sink.messages} == {case.sender}, what
            lines = sink.messages[0].body.partition(b"\r\n\r\n")[0].decode().split("\r\n")
            assert set(case.fields) <= set(lines), (what, lines)
            assert "hid@d.example" not in sink.messages[0].body.decode(), what
        assert len(relay.events("accepted")) == len(CASES)
