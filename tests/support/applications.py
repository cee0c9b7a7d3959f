"""Applications and libraries that send mail, each run as docs/send/applications.md has it.

A `Client` puts the page's configuration and its sending together to one program, with the ports, addresses
and passwords of a test, and runs it in a process of its own. Everything comes from Debian, PyPI or npm, is
unpacked below `.cache` and not installed. A program that cannot be had raises.
"""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests.support import mounts
from tests.support.debian import CACHE, REPOSITORY, UnpackedPackage, providers, ready_package
from tests.support.locks import locked
from tests.support.ports import LOOPBACK, wait_until
from tests.support.process import PROGRAM
from tests.support.programs import from_npm, from_pypi
from tests.support.senders import Result, run

PAGE = REPOSITORY / "docs" / "send" / "applications.md"
USER = "shop"
ANN = "ann@example.com"
KEY = "order-4711"
SENDMAIL = "/usr/sbin/sendmail"

PYTHON_PACKAGES = ("django==5.2.*", "flask==3.*", "flask-mail==0.10.*")
NODEMAILER = "10"
BUILD_TIMEOUT = 300.0
CRON_TIMEOUT = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """One run: to whom, with which key, and where to. With a `password` over TLS."""

    recipients: Sequence[str]
    port: int
    directory: Path
    key: str = KEY
    password: str = ""
    ca: Path | None = None

    @property
    def kind(self) -> int:
        """Which configuration of the page."""
        return 1 if self.password else 0


@dataclass(frozen=True)
class Client:
    """What a client of the page has in common with the others; `error` finds the name of its error."""

    title: str
    error: str
    environment: Mapping[str, str] = field(default_factory=dict)
    name = '"{}"'
    between = ", "
    """How the page writes a recipient, and what stands between two."""
    can_tls = True
    can_again = True
    """Whether it may be told to send the same message again."""
    subject = "Your order"

    def send(self, sending: Sending) -> Result:
        raise NotImplementedError

    def failure(self, result: Result) -> str:
        """Its error as the table has it; "" if it knows of none."""
        if result.code == 0:
            return ""
        found = re.search(self.error, result.transcript)
        return f"`{found[1]}`" if found else f"exit status {result.code}"

    def blocks(self, sending: Sending) -> list[str]:
        """The page's blocks for this client, with the values of the test."""
        values = {
            "relay.example.org": LOOPBACK,
            "2525": str(sending.port),
            "587": str(sending.port),
            KEY: sending.key,
            self.name.format(ANN): self.between.join(map(self.name.format, sending.recipients)),
        }
        values.setdefault(ANN, ", ".join(sending.recipients))
        blocks = page_blocks(self.title)
        for old, new in values.items():
            blocks = [block.replace(old, new) for block in blocks]
        return blocks

    def run(self, sending: Sending, command: Sequence[str], stdin: str = "") -> Result:
        environment = {**os.environ, "LC_ALL": "C", "HOME": str(sending.directory), **self.environment}
        if sending.password:
            environment["RELAY_PASSWORD"] = sending.password
        if sending.ca is not None:
            environment |= {"SSL_CERT_FILE": str(sending.ca), "NODE_EXTRA_CA_CERTS": str(sending.ca)}
        return run(command, stdin=stdin.encode(), environment=environment)


@cache
def _sections() -> Mapping[str, list[str]]:
    sections = re.split(r"^## (.*)\n", PAGE.read_text(), flags=re.MULTILINE)[1:]
    return {
        title: re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        for title, text in zip(sections[::2], sections[1::2], strict=True)
    }


def page_blocks(title: str) -> list[str]:
    return _sections()[title]


class PythonClient(Client):
    before = ""
    between_blocks = ""

    def send(self, sending: Sending) -> Result:
        *configurations, code = self.blocks(sending)
        program = "\n".join((self.before, configurations[sending.kind], self.between_blocks, code))
        return self.run(sending, [sys.executable, "-c", program])


class Django(PythonClient):
    before = "import os"
    between_blocks = (
        "from django.conf import settings\n"
        "settings.configure(**{name: value for name, value in list(globals().items()) if name.isupper()})"
    )


class Flask(PythonClient):
    before = "import os\nfrom flask import Flask\napp = Flask('shop')"


def python_environment() -> dict[str, str]:
    return {"PYTHONPATH": str(from_pypi("python-applications", *PYTHON_PACKAGES))}


class Nodemailer(Client):
    def send(self, sending: Sending) -> Result:
        *configurations, code = self.blocks(sending)
        return self.run(sending, ["node", "-e", configurations[sending.kind] + code])


def node_environment() -> dict[str, str]:
    return {"NODE_PATH": str(from_npm("nodemailer", {"nodemailer": NODEMAILER}) / "node_modules")}


@cache
def _php() -> tuple[str, UnpackedPackage]:
    (name,) = providers("php-cli", r"php[0-9.]+-cli")
    version = name.removesuffix("-cli")
    package = ready_package(
        name,
        f"usr/bin/{version}",
        "usr/share/php/libphp-phpmailer/src/PHPMailer.php",
        also=("libphp-phpmailer",),
    )
    return f"usr/bin/{version}", package


def php_environment() -> dict[str, str]:
    return {"LD_LIBRARY_PATH": _php()[1].library_path()}


def _php_command(*settings: str) -> list[str]:
    """`-n`: no configuration of this machine."""
    program, package = _php()
    return [str(package.path(program)), "-n", *(word for each in settings for word in ("-d", each))]


class PhpMail(Client):
    can_tls = False
    name = "{}"

    def send(self, sending: Sending) -> Result:
        settings, code = self.blocks(sending)
        script = sendmail(sending)
        line = settings.strip().replace(SENDMAIL, str(script)).replace('"', "")
        return self.run(sending, [*_php_command(line), "-r", code])

    def failure(self, result: Result) -> str:
        return "`false`" if result.code else ""


class PhpMailer(Client):
    def send(self, sending: Sending) -> Result:
        *configurations, code = self.blocks(sending)
        source = _php()[1].root / "usr/share/php/libphp-phpmailer/src"
        needed = "".join(f"require '{source}/{name}.php';\n" for name in ("Exception", "PHPMailer", "SMTP"))
        made = "$mail = new PHPMailer\\PHPMailer\\PHPMailer(true);\n"
        trust = [f"openssl.cafile={sending.ca}"] if sending.ca else []
        program = needed + made + configurations[sending.kind] + code
        return self.run(sending, [*_php_command("display_errors=stderr", *trust), "-r", program])


class ActionMailer(Client):
    before = """
require "mail"
require "ostruct"
config = OpenStruct.new(action_mailer: OpenStruct.new)
"""
    between_blocks = """
define_method(:mail) do |headers|
  Mail.new(headers).tap { |made| made.delivery_method :smtp, config.action_mailer.smtp_settings }.deliver!
end
"""

    def send(self, sending: Sending) -> Result:
        *configurations, code = self.blocks(sending)
        program = self.before + configurations[sending.kind] + self.between_blocks + code
        name, package = _ruby()
        return self.run(sending, [str(package.path(f"usr/bin/{name}")), "-e", program])


@cache
def _ruby() -> tuple[str, UnpackedPackage]:
    (name,) = providers("ruby", r"ruby[0-9.]+")
    package = UnpackedPackage(name, also=[f"lib{name}", "ruby-mail", "ruby-mini-mime"])
    # These have libraries of their own.
    parts = [f"usr/lib/*/ruby/{_ruby_version(name)}/{part}.so" for part in ("openssl", "psych", "zlib")]
    package.ensure([f"usr/bin/{name}", "usr/lib/ruby/vendor_ruby/mail.rb", *parts])
    return name, package


def _ruby_version(name: str) -> str:
    return f"{name.removeprefix('ruby')}.0"


def ruby_environment() -> dict[str, str]:
    name, package = _ruby()
    places = (
        "usr/lib/ruby/vendor_ruby",
        "usr/share/rubygems-integration/all/gems/mini_mime-*/lib",
        f"usr/lib/ruby/{_ruby_version(name)}",
        f"usr/lib/*/ruby/{_ruby_version(name)}",
    )
    return {
        "LD_LIBRARY_PATH": package.library_path(),
        "RUBYLIB": os.pathsep.join(str(package.path(place)) for place in places),
        "RUBYOPT": "-W0",
    }


class Go(Client):
    def send(self, sending: Sending) -> Result:
        (code,) = page_blocks(self.title)
        where = {"RELAY": f"{LOOPBACK}:{sending.port}"}
        if sending.password:
            where["RELAY_USER"] = USER
        line = [f"{name}={value}" for name, value in where.items()]
        return self.run(sending, ["env", *line, str(_compiled(code)), sending.key, *sending.recipients])


@cache
def _compiled(code: str) -> Path:
    """Debian's Go compiles it once for all runs of the tests."""
    home = CACHE / "go-application"
    program = home / hashlib.sha256(code.encode()).hexdigest()[:16]
    with locked(home):
        if not program.exists():
            (name,) = providers("golang-go", r"golang-[0-9.]+-go")
            package = UnpackedPackage(name, also=[f"{name.removesuffix('-go')}-src"])
            package.ensure(["usr/lib/go-*/VERSION"])  # the program itself may be static
            go = package.path("usr/lib/go-*/bin/go")
            source = home / "main.go"
            source.write_text(code)
            settings = {
                "GOTOOLCHAIN": "local",
                "GOROOT": str(go.parents[1]),
                "GOCACHE": str(home / "cache"),
                "GO111MODULE": "off",
            }
            # Without a C compiler.
            environment = {**os.environ, **settings, "GOPATH": str(home / "path"), "CGO_ENABLED": "0"}
            subprocess.run(
                [str(go), "build", "-o", str(program), str(source)],
                env=environment,
                timeout=BUILD_TIMEOUT,
                check=True,
            )
    return program


class Msmtp(Client):
    name = "{}"

    def send(self, sending: Sending) -> Result:
        *configurations, code = self.blocks(sending)
        text = configurations[sending.kind].replace("cat /etc/relay.password", "printenv RELAY_PASSWORD")
        if sending.ca is not None:
            text = text.replace("tls on\n", f"tls on\ntls_trust_file {sending.ca}\n")
        (sending.directory / ".msmtprc").write_text(text)
        (sending.directory / ".msmtprc").chmod(0o600)
        return self.run(sending, ["sh", "-c", code])


def msmtp_environment() -> dict[str, str]:
    package = ready_package("msmtp", "usr/bin/msmtp")
    path = os.pathsep.join((str(package.root / "usr/bin"), os.environ["PATH"]))
    return {"PATH": path, "LD_LIBRARY_PATH": package.library_path()}


class GitSendEmail(Client):
    name = "--to={}"
    between = " "

    def send(self, sending: Sending) -> Result:
        *configurations, code = self.blocks(sending)
        settings = sending.directory / "gitconfig"
        password = f"\tsmtpPass = {sending.password}\n" if sending.password else ""
        own = "[user]\n\tname = The Shop\n\temail = shop@example.org\n"
        settings.write_text(configurations[sending.kind] + password + own)
        patch = sending.directory / "order.patch"
        patch.write_text(
            "From: shop@example.org\nDate: Thu, 1 Jan 2026 00:00:00 +0000\nSubject: Your order\n\n"
            "It is on its way.\n"
        )
        program = code.replace("git send-email", f"perl {_git().path(GIT_SEND_EMAIL)}")
        program = program.replace("order.patch", str(patch))
        where = [f"GIT_CONFIG_GLOBAL={settings}", "GIT_CONFIG_NOSYSTEM=1", "GIT_DIR=/nonexistent"]
        return self.run(sending, ["env", *where, "sh", "-c", program])


GIT_SEND_EMAIL = "usr/lib/git-core/git-send-email"


@cache
def _git() -> UnpackedPackage:
    package = UnpackedPackage(
        "git-email",
        also=["libmailtools-perl", "libio-socket-ssl-perl", "libnet-ssleay-perl", "libauthen-sasl-perl"],
    )
    needed = ("usr/share/perl5/Mail/Address.pm", "usr/lib/*/perl5/*/auto/Net/SSLeay/SSLeay.so")
    package.ensure([GIT_SEND_EMAIL, *needed])
    return package


def git_environment() -> dict[str, str]:
    package = _git()
    module = package.path("usr/lib/*/perl5/*/Net/SSLeay.pm")
    places = (package.root / "usr/share/perl5", module.parents[1])
    return {"PERL5LIB": os.pathsep.join(map(str, places)), "LD_LIBRARY_PATH": package.library_path()}


class Cron(Client):
    """Debian's cron, as root, where other files are mounted in the place of the machine's own.

    A Result is what sendmail told cron: cron itself says it to the system's log only.
    """

    name = "{}"
    between = ","
    can_tls = can_again = False
    subject = "Cron "

    def send(self, sending: Sending) -> Result:
        (table,) = self.blocks(sending)
        status, said = sending.directory / "status", sending.directory / "said"
        machine = _machine(sending.directory / "machine", table)
        script = sendmail(sending).read_text().replace("exec ", "").rstrip()
        (machine / "sbin/sendmail").write_text(
            f"{script} 2>{said}\necho $? >{status}.new\nmv {status}.new {status}\n"
        )
        (machine / "sbin/sendmail").chmod(0o755)
        binds = [f"mount --bind {shlex.quote(str(machine / ours))} {theirs}" for ours, theirs in MOUNTS]
        program = " && ".join((*binds, "exec /usr/sbin/cron -f"))
        with subprocess.Popen(
            [sys.executable, mounts.__file__, "sh", "-c", program],
            env={**os.environ, **self.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as cron:
            try:
                wait_until(lambda: status.exists() or cron.poll() is not None, timeout=CRON_TIMEOUT)
            finally:
                cron.kill()
            if not status.exists():
                assert cron.stdout is not None
                raise AssertionError(f"cron called no sendmail: {cron.stdout.read().decode()}")
        return Result(int(status.read_text()), said.read_text())


MOUNTS = (("sbin", "/usr/sbin"), ("etc", "/etc"), ("spool", "/var/spool"), ("run", "/run"))
"""The machine's own jobs, users and programs are out of cron's reach."""


def _machine(place: Path, table: str) -> Path:
    for folder in ("sbin", "etc/pam.d", "spool/cron/crontabs", "run"):
        (place / folder).mkdir(parents=True)
    for name in ("passwd", "group", "nsswitch.conf", "ld.so.cache", "localtime"):
        if (source := Path("/etc", name)).exists():
            shutil.copy(source, place / "etc" / name)
    kinds = ("account", "auth", "session")
    (place / "etc/pam.d/cron").write_text("".join(f"{kind} required pam_permit.so\n" for kind in kinds))
    crontab = place / "spool/cron/crontabs/root"
    crontab.write_text(table)
    crontab.chmod(0o600)
    shutil.copy(_cron().path(CRON), place / "sbin/cron")
    return place


CRON = "usr/sbin/cron"


def _cron() -> UnpackedPackage:
    return ready_package("cron", CRON)


def cron_environment() -> dict[str, str]:
    return {"LD_LIBRARY_PATH": _cron().library_path()}


def sendmail(sending: Sending) -> Path:
    """A script that is /usr/sbin/sendmail of the Debian package, for the relay at a port."""
    config = sending.directory / "sendmail.toml"
    nowhere = sending.directory / "nowhere"
    config.write_text(
        f'hostname = "client.test"\n[[listener]]\naddress = "{LOOPBACK}:{sending.port}"\n'
        f'[sendmail]\ndrop = "{nowhere}"\naliases = "{nowhere}"\n'
    )
    script = sending.directory / "sendmail"
    script.write_text(
        f"#!/bin/sh\nexport ZONERELAY_CONFIG={shlex.quote(str(config))}\n"
        f'exec {shlex.quote(str(PROGRAM))} sendmail "$@"\n'
    )
    script.chmod(0o755)
    return script


CLIENTS: Mapping[str, Callable[[], Client]] = {
    "Django": lambda: Django("Django", r"smtplib\.(SMTP\w+)", python_environment()),
    "Flask": lambda: Flask("Flask", r"smtplib\.(SMTP\w+)", python_environment()),
    "nodemailer": lambda: Nodemailer("nodemailer", r"code: '(\w+)'", node_environment()),
    "PHP mail()": lambda: PhpMail("PHP mail()", "", php_environment()),
    "PHPMailer": lambda: PhpMailer("PHPMailer", r"PHPMailer\\(Exception)", php_environment()),
    "ActionMailer": lambda: ActionMailer("ActionMailer", r"\((\w[\w:]+)\)", ruby_environment()),
    "Go": lambda: Go("Go", r"(textproto\.Error|EOF)"),
    "msmtp": lambda: Msmtp("msmtp", r"^$", msmtp_environment()),
    "cron": lambda: Cron("cron", r"^$", cron_environment()),
    "git send-email": lambda: GitSendEmail("git send-email", r"^$", git_environment()),
}
"""Each by the title of its recipe; made when a test needs it."""
