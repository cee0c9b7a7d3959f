# Everything a person or CI runs. The environment is built by the first target that needs it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

# pip's own complaint about a missing compiler or header is hard to read.
define PLYVEL_HINT

If it was plyvel that could not be built: it comes ready-made for Python 3.11 and 3.12 only. Take one of these,
    make PYTHON=python3.12 run
or let pip compile it:
    apt install build-essential python3-dev libleveldb-dev
endef
export PLYVEL_HINT

.PHONY: help run sandbox test check fmt fuzz bench clean

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' Makefile

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("zonerelay needs Python 3.11 or 3.12: make PYTHON=python3.12 …")'
	@echo "Building the environment in $(VENV), once; this takes about half a minute."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]' || { echo "$$PLYVEL_HINT"; exit 1; }
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

# Tests marked `alone` measure the machine. 5 is pytest's "nothing to run": no failure if the other half ran.
test: $(STAMP)  ## every tier but bench; ARGS="tests/unit -k dkim" for some
	@$(BIN)/pytest -n auto --dist load --maxschedchunk 1 -m "not alone" $(ARGS); many=$$?; \
	$(BIN)/pytest -m alone $(ARGS); alone=$$?; \
	test $$alone -ne 5 && test $$many -eq 0 -o $$many -eq 5 && exit $$alone; exit $$many

fmt: $(STAMP)  ## let ruff correct what it can
	$(BIN)/ruff check --fix zonerelay tests
	$(BIN)/ruff format zonerelay tests

fuzz: $(STAMP)  ## every parser with atheris, a minute each
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[fuzz]'
	$(BIN)/python -m tests.fuzz

bench: $(STAMP)  ## against Postfix, in one run
	$(BIN)/python -m tests.bench

clean:  ## remove the environment and caches; the spool under ./var stays
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
