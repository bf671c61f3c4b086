# make run    a small policy learns to use a terminal; ARGS="steps=5 seed=1" passes overrides
# make test   all tests
# make lint   lint, format and types
# make setup  only the set-up that the others do by themselves: .venv, pinned by constraints.txt
#
# PYTHON=python3.12 picks an interpreter. PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu" takes
# PyTorch's CPU build, 0.2 GB instead of 3.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := run
.PHONY: run test lint setup

SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))
PYTHON ?= $(shell for python in python3.11 python3.12 python3; do \
	$$python -c '$(SUPPORTED)' >/dev/null 2>&1 && { echo $$python; break; }; done)
PIP_ARGS ?=
ARGS ?=
VENV := .venv/bin/python
STAMP := .venv/.set-up

run: $(STAMP)
	@echo "Starting a run; -h in ARGS explains the options, Ctrl-C ends it in order."
	@$(VENV) -m pipelines.run $(ARGS)

test: $(STAMP)
	@$(VENV) -m pytest -q $(ARGS)

lint: $(STAMP)
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/pyright

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "Setting up .venv, once; it takes a few minutes."
	@$(if $(PYTHON),,echo "python: none of version 3.11 or 3.12 found; sudo apt-get install python3 python3-venv" >&2; exit 1)
	@"$(PYTHON)" -c '$(SUPPORTED)' 2>/dev/null || { echo "PYTHON: $(PYTHON); needs version 3.11 or 3.12" >&2; exit 1; }
	@$(VENV) -c '$(SUPPORTED)' >/dev/null 2>&1 || { \
		"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
			echo "python: $(PYTHON) cannot make virtual environments; sudo apt-get install python3-venv" >&2; exit 1; }; \
		"$(PYTHON)" -m venv --clear .venv; }
	@$(VENV) -m pip install --disable-pip-version-check --progress-bar off $(PIP_ARGS) -c constraints.txt -e '.[dev]' \
		| awk '/^ *Collecting/ && ++n % 20 == 0 { print "  " n " packages found"; fflush() } \
			/^Installing collected/ { print "  installing"; fflush() }'
	@touch $@
