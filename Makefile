# Every target prepares .venv by itself; nothing but Python 3.11+, pip and make is needed.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready-dev
BENCH  := $(VENV)/.ready-bench
# Keep compiled modules even if the shell says otherwise: the tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE :=
# How long random faults are injected, and the seed of all that is random; without one, it is the time, and is printed.
SECONDS ?= 60
ifeq ($(SEED),)
SEED    := $(shell date +%s)
endif

.PHONY: demo test check docs docs-serve faults bench soak format clean help

help:
	@echo "make demo    runs tasks on an embedded Postgres and kills a worker on the way"
	@echo "make test    the test suite, on real Postgres"
	@echo "make check   format, lint, types, imports, the documentation site and the tests: what CI runs"
	@echo "make docs    builds the documentation site into site/; fails on a broken link"
	@echo "make docs-serve  shows the site on http://127.0.0.1:8000 and rebuilds it at every change"
	@echo "make faults  every cancellation and broken connection, all races, random flows with crashes, then SECONDS=60 of random faults (SEED=n repeats a run)"
	@echo "make format  formats the code and applies automatic fixes"
	@echo "make bench   runs the benchmark beside the raw limit and the peers"
	@echo "make soak    runs ten minutes at full rate on a store with a million retained executions"
	@echo "make clean   removes the virtual environment, the site and the caches"

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $@

$(BENCH): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev,bench]"
	@touch $@

demo: $(STAMP)
	$(BIN)/python -m flowfabric.cli.demo

test: $(STAMP)
	$(BIN)/python -m pytest -n 3 --dist worksteal

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(MAKE) docs
	$(MAKE) test

docs: $(STAMP)
	$(BIN)/mkdocs build --strict --quiet

docs-serve: $(STAMP)
	$(BIN)/mkdocs serve --strict

faults: $(STAMP)
	FF_TEST_SWEEP=whole FF_TEST_SEED=$(SEED) $(BIN)/python -m pytest -n 4 --dist worksteal tests/faults tests/scenarios/test_*races.py tests/engine/flow/test_random_graphs.py
	$(BIN)/python -m tests.faults --seconds $(SECONDS) --seed $(SEED)

bench: $(BENCH)
	$(BIN)/python -m flowfabric.bench

soak: $(BENCH)
	$(BIN)/python -m flowfabric.bench --soak

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
