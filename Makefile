# `make demo` and `make test` need nothing but Python 3.11, 3.12 or 3.13 and a way to reach the packages of the lock.
# Each is run, as a name may stand for a version that isn't active (pyenv).
FIND_PYTHON = for name in python3.11 python3.12 python3.13 python3; do \
	$$name -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$name && break; done
PYTHON ?= $(shell $(FIND_PYTHON))
NO_PYTHON = There is no Python 3.11, 3.12 or 3.13 here: install one, or type where it is, PYTHON=/path/to/python3.12
BIN := .venv/bin
INSTALLED := .venv/.installed
# One thread per process: the tests start several processes, and ranks must not share cores.
ONE_THREAD := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
# Where it is set, each of the many processes would compile all of the source again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo demo-chat test test-all check lint types imports bench exactness docs clean

install: $(INSTALLED)

$(INSTALLED): requirements.lock pyproject.toml
	$(or $(PYTHON),$(error $(NO_PYTHON))) -m venv .venv
	# What is used compiles at its first import: all of it would take pip half a minute.
	$(BIN)/pip install --disable-pip-version-check --quiet --no-compile -r requirements.lock
	$(BIN)/pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation -e .
	touch $@

demo: $(INSTALLED)
	$(BIN)/slipstream train examples/demo.yaml --training.overwrite=true

# A chat model from nothing: pre-trained, adapted by LoRA, interrupted, resumed to the bit, and asked.
demo-chat: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python examples/chat/demo.py

# A file's tests on one worker: they share what its fixtures have started. A test that is ended by its timeout takes the
# worker with it, and one that is started in its place may wait for ever (issue 1378 of pytest-xdist): so none is.
TWO_WORKERS := -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart=0 --durations=20
# CI names a program here that runs what failed once more.
RUN_TESTS := -m pytest
PYTEST = $(ONE_THREAD) $(BIN)/python $(RUN_TESTS)

# Every feature once, on two cores; properties are tried with a fifth of their examples, which `make exactness` completes.
test: $(INSTALLED)
	$(PYTEST) -m "not more and not grid" --hypothesis-profile=thin $(TWO_WORKERS)

# The same and further combinations, in one run: tests of one file share what its fixtures have started.
test-all: $(INSTALLED)
	$(PYTEST) -m "not grid" --hypothesis-profile=thin $(TWO_WORKERS)

check: lint types imports docs test

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

imports: $(INSTALLED)
	$(BIN)/lint-imports

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks

exactness: $(INSTALLED)
	$(BIN)/python -m benchmarks.exactness
	$(ONE_THREAD) $(BIN)/python -m benchmarks.random_exactness --cases 300
	$(ONE_THREAD) $(BIN)/python -m benchmarks.random_exactness --meshes --cases 200
	$(PYTEST) -m "grid or hypothesis" -n 2

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf .venv build dist site runs .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find src tests -name __pycache__ -prune -exec rm -rf {} +
	rm -rf src/slipstream.egg-info
