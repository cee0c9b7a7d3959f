# Everything a person or CI runs. The environment is built by the first target that needs it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

.PHONY: run sandbox test check fmt bench clean

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info[:2] >= (3, 11) else "zonerelay needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

run: $(STAMP)  ## start the relay with config/zonerelay.toml, spool under ./var
	$(BIN)/zonerelay serve --config config/zonerelay.toml

sandbox: $(STAMP)  ## relay and scriptable sink on loopback: watch mail flow
	$(BIN)/zonerelay sandbox

check: $(STAMP)  ## ruff, mypy strict, import-linter
	$(BIN)/ruff check zonerelay tests
	$(BIN)/ruff format --check zonerelay tests
	$(BIN)/mypy
	$(BIN)/lint-imports

test: $(STAMP)  ## every tier but bench
	$(BIN)/pytest

fmt: $(STAMP)
	$(BIN)/ruff check --fix zonerelay tests
	$(BIN)/ruff format zonerelay tests

bench: $(STAMP)  ## against Postfix, in one run
	$(BIN)/python -m tests.bench

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
