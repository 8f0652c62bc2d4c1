# Two commands: `make up` runs everything, `make test` sets up likewise and runs the tests. `make help` lists the rest.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# Which interpreter makes .venv. Python 3.11 or newer; named on the command line to use another: make up PYTHON=python3.12
PYTHON ?= python3.11
PIP := .venv/bin/python -m pip --disable-pip-version-check --no-input
ARGS ?=

# $(call install,EXTRA,STAMP): .venv with the project and an extra. What is installed is described by two files and the
# place of the checkout; the stamp remembers their digest, and is written last, so that an interrupted run is repeated.
# What the tests need includes what running needs, so their stamp will do for both.
define install
	@digest=$$({ pwd; cat pyproject.toml constraints.txt; } | sha256sum | cut -d' ' -f1); \
	if ! grep -qsx "$$digest" .venv/$(2) .venv/.halocline-test; then \
	  if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then \
	    command -v $(PYTHON) >/dev/null 2>&1 || { \
	      echo "halocline: there is no $(PYTHON) here. Install Python 3.11 (or name a newer one: make PYTHON=python3.12 $(MAKECMDGOALS))." >&2; exit 1; }; \
	    $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	      echo "halocline: $(PYTHON) is older than 3.11. Name a newer one: make PYTHON=python3.11 $(MAKECMDGOALS)." >&2; exit 1; }; \
	    $(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	      echo "halocline: $(PYTHON) has no venv or ensurepip. Install them (on Debian and Ubuntu: the package python3.11-venv)." >&2; exit 1; }; \
	    echo "making .venv with $$($(PYTHON) --version)"; \
	    $(PYTHON) -m venv --clear .venv; \
	  fi; \
	  echo "installing from constraints.txt (some minutes the first time)"; \
	  $(PIP) install -q -c constraints.txt -e '.[$(1)]' </dev/null || { \
	    echo "halocline: pip could not install what constraints.txt names; its message above says what. Which index it uses: .venv/bin/python -m pip config list. Run the same command again when the cause is gone." >&2; exit 1; }; \
	  echo "$$digest" > .venv/$(2); \
	fi
endef

.PHONY: help up test test-unit test-long check format setup setup-test fetch-model clean

help: ## List the targets.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/make \1\t\2/' | expand -t 18

up: setup ## Install, fetch the demo model, and run gateway, engine and cached until Ctrl-C. ARGS="--listen 127.0.0.1:9000"
	@.venv/bin/halocline fetch-model >/dev/null
	@exec .venv/bin/halocline up $(ARGS)

test: setup-test fetch-model ## Install, fetch the demo model, and run the tests. ARGS="-k name"
	@.venv/bin/python -m pytest $(ARGS) </dev/null

test-unit: setup-test ## The part of the tests that needs no process and no model.
	@.venv/bin/python -m pytest tests/unit tests/property tests/tidy $(ARGS) </dev/null

test-long: setup-test fetch-model ## Soaks, torture and fuzzing; not part of CI.
	@.venv/bin/python -m pytest -m long --timeout 3600 $(ARGS) </dev/null

check: setup-test ## Format, lint and types.
	@.venv/bin/ruff format --check .
	@.venv/bin/ruff check .
	@.venv/bin/mypy halocline.py command gateway engine cached tenants bench
	@.venv/bin/mypy --strict $$(.venv/bin/python -m tests.tidy.layers value policy core)

format: setup-test ## Format and fix what ruff can fix.
	@.venv/bin/ruff format .
	@.venv/bin/ruff check --fix .

setup: ## Make .venv with what running needs.
	$(call install,sdk,.halocline-run)

setup-test: ## Make .venv with what the tests need.
	$(call install,sdk$(comma)test,.halocline-test)

fetch-model: setup-test
	@if [ -z "$${HALOCLINE_TEST_MODEL:-}" ]; then .venv/bin/halocline fetch-model >/dev/null; fi

clean: ## Remove .venv and caches; models, keys and tenants stay.
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info

comma := ,
