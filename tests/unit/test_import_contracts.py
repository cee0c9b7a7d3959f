"""The contracts of import-linter in pyproject.toml: an import that one of them forbids breaks it."""

from __future__ import annotations

import tomllib
from copy import deepcopy
from pathlib import Path
from typing import Any

import grimp
import pytest
from importlinter.configuration import configure
from importlinter.contracts.acyclic_siblings import AcyclicSiblingsContract
from importlinter.contracts.forbidden import ForbiddenContract
from importlinter.contracts.independence import IndependenceContract
from importlinter.contracts.layers import LayersContract
from importlinter.contracts.protected import ProtectedContract

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
OPTIONS = PROJECT["tool"]["importlinter"]
TYPES: dict[str, Any] = {
    "acyclic_siblings": AcyclicSiblingsContract,
    "forbidden": ForbiddenContract,
    "independence": IndependenceContract,
    "layers": LayersContract,
    "protected": ProtectedContract,
}
PLANTED = [
    ("Layers", "zonerelay.model.address", "zonerelay.queue.scheduler"),
    ("Layers", "zonerelay.inbound.cleanup.intake", "zonerelay.queue.scheduler"),  # programs
    ("circles", "zonerelay.config.units", "zonerelay.config.settings"),
    ("circles", "zonerelay.inbound.refusal", "zonerelay.inbound.listen.listener"),
    ("no I/O", "zonerelay.smtp.server.params", "asyncio"),
    ("no other engine", "zonerelay.store.redis.connection", "zonerelay.store.postgres.driver"),
    ("store/ alone", "zonerelay.queue.scheduler", "zonerelay.store.leveldb.engine"),
    ("store/ alone", "zonerelay.queue.scheduler", "zonerelay.store.common.records"),
    ("face of config/", "zonerelay.queue.scheduler", "zonerelay.config.tables.webhook"),
    ("homes", "zonerelay.queue.scheduler", "aiosmtplib"),
    ("homes", "zonerelay.delivery.batch.courier", "OpenSSL"),
]


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    configure()
    return grimp.build_graph("zonerelay", include_external_packages=True)


def is_kept(graph: grimp.ImportGraph, contract: dict[str, Any]) -> bool:
    session = {"root_packages": ["zonerelay"], "include_external_packages": "True"}
    made = TYPES[contract["type"]](contract["name"], session, contract)
    return bool(made.check(deepcopy(graph), verbose=False).kept)  # the check takes what is ignored out


@pytest.mark.parametrize(("name", "importer", "imported"), PLANTED)
def test_a_planted_import_breaks_its_contract(
    graph: grimp.ImportGraph, name: str, importer: str, imported: str
) -> None:
    (contract,) = (each for each in OPTIONS["contracts"] if name in each["name"])
    assert {importer, imported} <= graph.modules
    assert is_kept(graph, contract)
    with_planted = deepcopy(graph)
    with_planted.add_import(importer=importer, imported=imported)
    assert not is_kept(with_planted, contract)


def test_every_contract_is_broken_by_a_planted_import() -> None:
    assert all(any(name in each["name"] for name, _, _ in PLANTED) for each in OPTIONS["contracts"])


def test_circles_of_imports_for_types_alone_count(graph: grimp.ImportGraph) -> None:
    assert not OPTIONS.get("exclude_type_checking_imports")
    importer, imported = "zonerelay.inbound.state.transaction", "zonerelay.inbound.cleanup.intake"
    assert not graph.find_shortest_chain(importer, imported)
