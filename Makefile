# Every target explains itself: `make help`. CI calls the same targets.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MODEL ?= smollm2
PORT ?= 8000
HOST ?= 127.0.0.1
PY := .venv/bin/python

help: ## list the targets
	@awk 'BEGIN{FS=":.*## "} /^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  variables:  MODEL=$(MODEL)  PORT=$(PORT)  HOST=$(HOST)  OFFLINE=1 (install from ./wheelhouse)  PYTHON=..."

serve: ## set up, fetch the small model, serve it, print a curl line
	@bash scripts/setup.sh core
	@exec $(PY) -m ai_engine.cli serve $(MODEL) --host $(HOST) --port $(PORT) $(if $(filter 1,$(OFFLINE)),--offline,)

test: ## set up, pass all tests
	@bash scripts/setup.sh dev
	@$(PY) -m pytest $(ARGS)

check: ## format, lint, types, import rules
	@bash scripts/setup.sh dev
	@.venv/bin/ruff format --check . && .venv/bin/ruff check . && .venv/bin/mypy && .venv/bin/lint-imports --config pyproject.toml

full: ## the long evidence: fuzzing, whole-file comparisons (needs an hour)
	@bash scripts/setup.sh dev
	@$(PY) -m pytest -m full $(ARGS)

bench: ## measure speed, memory and start-up; writes bench/results/*.json
	@bash scripts/setup.sh dev
	@$(PY) -m bench.run $(ARGS)

golden: ## remake the committed goldens (needs the extras named in tests/golden/README.md)
	@bash scripts/setup.sh dev
	@$(PY) -m tests.golden.make_golden $(ARGS)

size: ## lines of code by room, against the design's mirror
	@python3 scripts/size.py

lock: ## remake the hashed locks from pyproject.toml (needs uv)
	@bash scripts/lock.sh

wheelhouse: ## download the locked wheels for OFFLINE=1
	@bash scripts/setup.sh core
	@$(PY) -m pip download --quiet --require-hashes --no-deps -r requirements-dev.lock -r requirements.lock -d wheelhouse

clean: ## remove the venv and caches of this checkout
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build

.PHONY: help serve test check full bench golden size lock wheelhouse clean
