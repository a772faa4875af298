# Two commands do everything on a machine with Python 3.11, make and git: `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt
# pip uses one core, and the compiler the other one. Without a compiler, the last command installs one.
# The pip that comes with Python 3.11 takes twice as long to find what to install.
define INSTALL
$(PYTHON) -c $(CHECK_VERSION)
$(PYTHON) -m venv $(VENV)
$(PIP) --upgrade pip
$(PYTHON) src/genius_search/native/build.py 2> /dev/null & GENIUS_COMPILE=later $(PIP) --editable $(PACKAGES); status=$$?; wait; exit $$status
$(BIN)/python -m genius_search.native.build --install-compiler
endef
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 25
CHECK_VERSION := 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "GENIUS needs Python 3.11 or newer: make PYTHON=/path/to/python3.11")'
OUT ?= demo

export OMP_WAIT_POLICY ?= PASSIVE
# Python keeps what it compiled, or each of the many processes that the tests start would compile it again.
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help

help:  ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

$(VENV)/run: PACKAGES = '.[evaluate,train]' matplotlib
$(VENV)/run: pyproject.toml constraints.txt $(wildcard src/genius_search/native/*.[ch])
	$(INSTALL)
	@touch $@

# One call of pip: each further one resolves everything again.
$(VENV)/dev: PACKAGES = '.[dev]'
$(VENV)/dev: pyproject.toml constraints.txt $(wildcard src/genius_search/native/*.[ch])
	$(INSTALL)
	@touch $(VENV)/run $@

setup: $(VENV)/dev  ## Make the virtual environment with everything for development

demo: $(VENV)/run  ## Draw a catalogue, train, index, search; leaves demo/index.html to open
	$(BIN)/python -m research.demo --out $(OUT)

test: $(VENV)/dev  ## Run the tests
	$(PYTEST) --durations-min 4 -m 'not slow and not gpu and not ray'

$(VENV)/research: $(VENV)/dev
	$(PIP) --editable '.[dev]' --requirement research/requirements.txt
	@touch $@

test-slow: $(VENV)/research  ## Run the tests that take minutes
	GENIUS_TYPES=everywhere $(PYTEST) -m 'slow and not gpu and not ray'

test-all: export GENIUS_TYPES = everywhere
test-all: test test-slow test-ray  ## Run all tests that need no GPU, with types checked everywhere

$(VENV)/ray: $(VENV)/dev
	$(PIP) --editable '.[cluster]'
	@touch $@

test-ray: $(VENV)/ray  ## Run the tests on three Ray nodes, on loopback addresses
	$(BIN)/python -m pytest --durations 10 -m ray tests/ray

check: $(VENV)/dev  ## Lint, types, layers, tests
	$(BIN)/ruff format --check src research tests
	$(BIN)/ruff check src research tests
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) test

$(VENV)/docs: $(VENV)/run
	$(PIP) --editable '.[docs]'
	@touch $@

site: $(VENV)/docs  ## Build the documents as a website, in site/
	$(BIN)/mkdocs build

$(VENV)/dist: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) build hatchling twine ziglang
	@touch $@

# With the time of the last commit as the time of every file, the same commit gives the same archives.
dist: $(VENV)/dist  ## Build the source archive and the wheel, in dist/
	rm -rf dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*

clean:  ## Remove what the demo and the builds made
	rm -rf $(OUT) dist site

.PHONY: help setup demo test test-slow test-all test-ray check site dist clean
