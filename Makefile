# Everything a person or CI runs. The environment is built by the first target that needs it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
DEVELOPMENT := $(VENV)/.development
LOCKED := --quiet --disable-pip-version-check --require-hashes --no-deps
COMPILE := --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header --upgrade

# pip's own complaint about a missing compiler or header is hard to read.
define PLYVEL_HINT

If it was plyvel, the binding to LevelDB, that could not be built: it comes ready-made for x86-64 and ARM (aarch64).
Elsewhere pip compiles it:
    apt install build-essential python3-dev libleveldb-dev
endef
export PLYVEL_HINT

# Each process of the tests would compile the whole tree again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help run sandbox deb test quick proof check fmt fuzz bench reference lock pin clean

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' Makefile

$(STAMP): pyproject.toml locks/build.lock locks/base.lock
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("zonerelay needs Python 3.11 or newer: make PYTHON=python3.13 …")'
	@echo "Building the environment in $(VENV), once; this takes about a quarter of a minute."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install $(LOCKED) -r locks/build.lock -r locks/base.lock || { echo "$$PLYVEL_HINT"; exit 1; }
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

$(DEVELOPMENT): $(STAMP) locks/dev.lock
	@echo "Adding what tests and checks need, once."
	@$(BIN)/pip install $(LOCKED) --use-pep517 --no-build-isolation -r locks/dev.lock
	@touch $@

run: $(STAMP)  ## start the relay with config/zonerelay.toml, spool under ./var
	$(BIN)/zonerelay serve --config config/zonerelay.toml

sandbox: $(STAMP)  ## relay and scriptable sink on loopback: watch mail flow
	$(BIN)/zonerelay sandbox

deb:  ## Debian packages for this release of Debian, into dist/
	@debian/build dist

check: $(DEVELOPMENT)  ## ruff, mypy strict, import-linter
	$(BIN)/ruff check zonerelay tests debian docs/examples
	$(BIN)/ruff format --check zonerelay tests debian docs/examples
	$(BIN)/mypy
	$(BIN)/lint-imports

# Tests marked `alone` measure the machine. 5 is pytest's "nothing to run": no failure if the other half ran.
define TESTS
@$(BIN)/python -m tests.support.programs
@$(BIN)/pytest -n auto --dist load --maxschedchunk 1 -m "not alone and $(1)" $(ARGS); many=$$?; \
$(BIN)/pytest -m "alone and $(1)" $(ARGS); alone=$$?; \
test $$alone -ne 5 && test $$many -eq 0 -o $$many -eq 5 && exit $$alone; exit $$many
endef

quick: $(DEVELOPMENT)  ## unit tests and dialogs, within a minute or so
	@$(BIN)/pytest -n auto --dist load --maxschedchunk 1 -m "not alone and not proof" tests/unit tests/dialogs $(ARGS)

test: $(DEVELOPMENT)  ## what guards everyday work; ARGS="tests/unit -k dkim" for some
	$(call TESTS,not proof)

proof: $(DEVELOPMENT)  ## what takes long: whole relays, kill -9 in rounds, several machines, other servers, the packages
	$(call TESTS,proof)

fmt: $(DEVELOPMENT)  ## let ruff correct what it can
	$(BIN)/ruff check --fix zonerelay tests debian
	$(BIN)/ruff format zonerelay tests debian

fuzz: $(DEVELOPMENT)  ## every parser with atheris, a minute each
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[fuzz]'
	$(BIN)/python -m tests.fuzz

bench: $(DEVELOPMENT)  ## against Postfix, in one run
	$(BIN)/python -m tests.bench

reference: $(STAMP)  ## write docs/reference from the commands and the operations
	$(BIN)/python debian/manual.py --reference docs/reference

# base.lock is what runs everywhere; the others have what a storage engine needs besides.
lock: $(STAMP)  ## the newest packages that pyproject.toml allows, with their hashes, into locks/
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[lock]'
	@echo 'setuptools>=77' | $(BIN)/uv pip compile $(COMPILE) --output-file locks/build.lock -
	@$(BIN)/uv pip compile $(COMPILE) --output-file locks/base.lock pyproject.toml
	@# What base.lock has for some versions of Python only, such as typing-extensions, is in dev.lock for the others.
	@for extra in redis postgres s3 dev; do \
	  $(BIN)/uv pip compile $(COMPILE) --extra $$extra --constraint locks/base.lock --output-file locks/$$extra.lock \
	    $$(grep -v "$$(test $$extra = dev && echo ';' || echo '^$$')" locks/base.lock | sed -n 's/^\([a-z0-9-]*\)==.*/--no-emit-package \1/p') \
	    pyproject.toml || exit 1; \
	done

pin:  ## the image is built from the base image of now, named by its digest; needs Docker and its registry
	@image=$$(sed -n 's/^FROM \([^@ ]*\).*/\1/p' Dockerfile | head -n 1); \
	digest=$$(docker buildx imagetools inspect "$$image" --format '{{.Manifest.Digest}}') || exit 1; \
	expr "$$digest" : 'sha256:[0-9a-f]\{64\}$$' >/dev/null || { echo "$$image: no digest, but $$digest"; exit 1; }; \
	sed -i "s|^FROM $$image[^ ]*|FROM $$image@$$digest|" Dockerfile; \
	echo "Dockerfile: $$image@$$digest"

clean:  ## remove the environment and caches; the spool under ./var stays
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
