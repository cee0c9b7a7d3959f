"""The identities of HTTP: the form of a token, its scope, and a file that is changed under a reader."""

from __future__ import annotations

from pathlib import Path

import pytest

from zonerelay.admin import access
from zonerelay.admin.access import Access
from zonerelay.admin.problems import ApiError
from zonerelay.admin.requests import RequestIdentity
from zonerelay.config.credentials import identities
from zonerelay.config.credentials.identities import Identities, IdentitiesError, Scope, Token
from zonerelay.model.clock import ManualClock


def token(name: str, text: str, *, scope: Scope = "read", expires: float = 0.0) -> Token:
    return identities.token_of(text, name, scope, created=1.0, expires=expires, user="")


def test_a_token_has_256_random_bits_and_a_prefix_that_scanners_know() -> None:
    made = {identities.make_token() for _ in range(100)}
    assert len(made) == 100
    assert all(each.startswith("zrt_") and len(bytes.fromhex(each[4:])) == 32 for each in made)


@pytest.mark.parametrize(
    ("scope", "may"), [("read", {"read"}), ("operate", {"read", "operate"}), ("submit", {"submit"})]
)
def test_operate_includes_read_and_submit_is_apart(scope: Scope, may: set[Scope]) -> None:
    scopes: tuple[Scope, ...] = ("read", "operate", "submit")
    assert {each for each in scopes if token("a", "t", scope=scope).may(each)} == may


def test_a_reader_sees_what_commands_change(tmp_path: Path) -> None:
    path = tmp_path / "identities.json"
    now = 100.0
    reader = Identities(path, lambda: now)
    first, second = identities.make_token(), identities.make_token()
    assert reader.identify(first) is None
    identities.add(path, token("first", first))
    identities.add(path, token("second", second, expires=101.0))
    assert [found and found.name for found in map(reader.identify, (first, second))] == ["first", "second"]
    now = 101.0
    assert reader.identify(second) is None
    assert reader.named("second") is None
    with pytest.raises(IdentitiesError, match="already exists; remove it, or choose another"):
        identities.add(path, token("first", second))
    identities.remove(path, "first")
    assert reader.identify(first) is None
    with pytest.raises(IdentitiesError, match="the token first does not exist"):
        identities.remove(path, "first")
    assert [each.name for each in tmp_path.iterdir()] == ["identities.json"]
    assert path.stat().st_mode & 0o777 == 0o640
    for wrong in ("{", '{"version": 2}', '{"version": 1, "tokens": [{"name": 1}]}'):
        path.write_text(wrong)
        with pytest.raises(IdentitiesError):
            reader.identify(first)


def test_the_token_file_is_one_token_more(tmp_path: Path) -> None:
    file = tmp_path / "token"
    reader = Identities(tmp_path / "identities.json", lambda: 1.0, token_file=file)
    file.write_text("0123456789abcdef0123456789abcdef\n")
    found = reader.identify("0123456789abcdef0123456789abcdef")
    assert found is not None
    assert (found.name, found.scope) == ("token_file", "operate")
    assert reader.identify("0123456789abcdef0123456789abcdeF") is None
    file.write_text("short\n")
    with pytest.raises(IdentitiesError, match="at least 32"):
        reader.identify("short")


def test_failures_are_remembered_of_a_limited_number_of_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "MAX_CLIENTS", 2)
    audited: list[str] = []
    reader = Identities(tmp_path / "identities.json", lambda: 1.0)
    door = Access(
        reader, ManualClock(), lambda fields: audited.append(fields["client"]), lambda where, error: None
    )
    for client in ("a", "b", "a", "c", "b"):  # the first failure of a client is logged
        with pytest.raises(ApiError, match="the token is invalid"):
            door.admit("zrt_wrong", RequestIdentity(client, secure=True, private=True))
    assert audited == ["a", "b", "c", "b"]
