# Every target prepares what it needs under .venv, and does nothing twice: a stamp file in each
# environment is older than pyproject.toml or constraints.txt only when there is work to do.
# Needs Python 3.11 or newer, make and pip's package index. `make clean` starts over.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:

VENV := .venv
CACHE := $(VENV)/cache

# What you may set: make test PYTEST_ARGS="-k storm -x" PYTEST_WORKERS=4
PYTEST_ARGS ?=
# One more than there are cores: some tests wait for servers, and each worker costs a start.
PYTEST_WORKERS ?= $(shell expr 1 + $$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2))
# One a core: the time that a fault takes is looked at.
FAULTS_WORKERS ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
BENCH_ARGS ?=
DEMO_ARGS ?=
SERVE_ARGS ?=
WALK_ARGS ?=
GROWTH_ARGS ?=
FUZZ_ARGS ?=
FAULTS_ARGS ?=
API_ARGS ?=
MUTANTS_ARGS ?=
DELIVERIES ?= 100000
STORM_ARGS ?=
SICK_ARGS ?=
SOAK_ARGS ?=
SCALE_ARGS ?=

# Nothing from outside may put the source tree, or another Python's library, on sys.path.
unexport PYTHONPATH PYTHONHOME
# Without bytecode on disk every process compiles what it imports, and pytest rewrites every test.
unexport PYTHONDONTWRITEBYTECODE
export MYPY_CACHE_DIR := $(CACHE)/mypy
export RUFF_CACHE_DIR := $(CACHE)/ruff
export HYPOTHESIS_STORAGE_DIRECTORY := $(CACHE)/hypothesis
export PIP_DISABLE_PIP_VERSION_CHECK := 1

PINS := pyproject.toml constraints.txt
SOURCES := $(shell find src -name __pycache__ -prune -o -print) $(wildcard README.md LICENSE scripts/index_readme.py)

.PHONY: help demo serve test test-all check fuzz storm faults mutants docs bench bench-growth walk wheel sbom clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z%.0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/demo/.wheel ## Send the same traffic through the gateway and through a receiver without it, kill both
	@$(VENV)/demo/bin/python examples/gateway_demo.py $(DEMO_ARGS)

serve: $(VENV)/demo/.wheel ## Run the gateway with nothing to set up, until Ctrl-C; prints its address and a token
	@$(VENV)/demo/bin/oncekey serve --demo $(SERVE_ARGS)

# The environments of both are prepared at the same time: pip keeps one core busy.
test: $(VENV)/pythons ## Test the built wheel on the oldest Python found, and in short on the newest
	@$(MAKE) --no-print-directory -j2 $(VENV)/paddle/.done \
	    $$(sed -n -e '1p' -e '$$p' $(VENV)/pythons | sed 's/ .*//; s|.*|$(VENV)/py&/.primed|' | sort -u)
	@ONCEKEY_TEST_SHORT=1 $(MAKE) --no-print-directory --keep-going \
	    test-py$$(sed -n '1s/ .*//p' $(VENV)/pythons) \
	    $$(sed -n '1d; $$s/ .*//p' $(VENV)/pythons | sed 's/^/test-light-py/')

test-all: $(VENV)/pythons ## Test the built wheel on the oldest and the newest Python found, in full
	@ONCEKEY_TEST_LONG=1 $(MAKE) --no-print-directory --keep-going \
	    $$(sed -n -e '1p' -e '$$p' $(VENV)/pythons | sed 's/ .*//; s/^/test-py/' | sort -u)

test-light-py%: $(VENV)/py%/.wheel
	@ONCEKEY_TEST_LIGHT=1 $(MAKE) --no-print-directory test-py$*

test-py%: $(VENV)/py%/.wheel $(VENV)/paddle/.done ## Test the built wheel on one version, such as test-py3.12
	@echo "== pytest on Python $*"
	@ONCEKEY_TEST_INSTALLED=1 ONCEKEY_TEST_PADDLE=$(CURDIR)/$(VENV)/paddle $(VENV)/py$*/bin/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal \
	    -o cache_dir=$(CACHE)/pytest-$* $(PYTEST_ARGS)

check: $(VENV)/check/.deps ## Lint, formatting, types (mypy and basedpyright), import contracts
	@failed=; bin=$(VENV)/check/bin; \
	run() { echo "== $$*"; "$$bin/$$@" || failed="$$failed $$1"; }; \
	run ruff check .; \
	run ruff format --check .; \
	run mypy --strict $(wildcard src tests/typing); \
	run basedpyright --pythonpath $(VENV)/check/bin/python $(wildcard src tests/typing); \
	PYTHONPATH=src; export PYTHONPATH; \
	run lint-imports --no-logo --cache-dir $(CACHE)/import-linter; \
	test -z "$$failed" || { echo "check failed:$$failed" >&2; exit 1; }

.PHONY: test-browser
test-browser: $(VENV)/browser/.wheel $(VENV)/axe/.done ## Drive the dashboard, and the docs if they are built, with this machine's Chromium
	@ONCEKEY_TEST_INSTALLED=1 ONCEKEY_TEST_AXE=$(CURDIR)/$(VENV)/axe $(VENV)/browser/bin/python -m pytest \
	    -o cache_dir=$(CACHE)/pytest-browser tests/browser $(PYTEST_ARGS)

.PHONY: test-brokers
test-brokers: $(VENV)/brokers/.wheel ## Test queues on the RabbitMQ of this machine, and AWS as moto emulates it
	@ONCEKEY_TEST_INSTALLED=1 $(VENV)/brokers/bin/python -m pytest \
	    -o cache_dir=$(CACHE)/pytest-brokers tests/brokers $(PYTEST_ARGS)

.PHONY: test-api
test-api: $(VENV)/api/.wheel ## Ask the gateway's API all that its OpenAPI document allows, and more: minutes
	@$(VENV)/api/bin/python scripts/api_check.py $(API_ARGS)

fuzz: $(VENV)/pythons ## Give every signature scheme 200,000 hostile deliveries: minutes
	@$(MAKE) --no-print-directory fuzz-py$$(sed -n '1s/ .*//p' $(VENV)/pythons)

fuzz-py%: $(VENV)/py%/.wheel
	@$(VENV)/py$*/bin/python scripts/fuzz.py $(FUZZ_ARGS)

storm: $(VENV)/pythons ## 100,000 deliveries for each store, workers killed: up to an hour
	@$(MAKE) --no-print-directory storm-py$$(sed -n '1s/ .*//p' $(VENV)/pythons)

storm-py%: $(VENV)/py%/.wheel
	@ONCEKEY_STORM=$(DELIVERIES) ONCEKEY_TEST_INSTALLED=1 $(VENV)/py$*/bin/python -m pytest \
	    -s -o cache_dir=$(CACHE)/pytest-$* tests/faults/test_delivery_storm.py

.PHONY: storm-gateway sick-targets soak scale
storm-gateway: $(VENV)/pythons ## Kill gateways with -9 under load, 50 times on each store: ten minutes
	@$(MAKE) --no-print-directory script-py$$(sed -n '1s/ .*//p' $(VENV)/pythons) SCRIPT="storm_gateway.py $(STORM_ARGS)"

sick-targets: $(VENV)/pythons ## Healthy targets beside five sick ones: four minutes
	@$(MAKE) --no-print-directory script-py$$(sed -n '1s/ .*//p' $(VENV)/pythons) SCRIPT="sick_targets.py $(SICK_ARGS)"

soak: $(VENV)/pythons ## Run a gateway at a fixed rate and look whether it grows: 20 minutes
	@$(MAKE) --no-print-directory script-py$$(sed -n '1s/ .*//p' $(VENV)/pythons) SCRIPT="soak_gateway.py $(SOAK_ARGS)"

scale: $(VENV)/pythons ## Sizing of a gateway, by arithmetic and by a simulation beside it
	@$(MAKE) --no-print-directory script-py$$(sed -n '1s/ .*//p' $(VENV)/pythons) SCRIPT="scale.py $(SCALE_ARGS)"

script-py%: $(VENV)/py%/.wheel
	@$(VENV)/py$*/bin/python scripts/$(SCRIPT)

faults: $(VENV)/pythons ## Break everything that can break, and report: each fault under a minute
	@$(MAKE) --no-print-directory faults-py$$(sed -n '1s/ .*//p' $(VENV)/pythons)

faults-py%: $(VENV)/py%/.wheel
	@ONCEKEY_TEST_INSTALLED=1 $(VENV)/py$*/bin/python scripts/faults.py -n $(FAULTS_WORKERS) \
	    --dist worksteal --json build/faults.json $(FAULTS_ARGS)

mutants: $(VENV)/pythons ## Make known mistakes in copies of the source: tests must notice each
	@$(MAKE) --no-print-directory mutants-py$$(sed -n '1s/ .*//p' $(VENV)/pythons)

mutants-py%: $(VENV)/py%/.deps
	@$(VENV)/py$*/bin/python scripts/mutants.py $(MUTANTS_ARGS)

docs: $(VENV)/docs/.wheel ## Build the documentation into build/docs; warnings are errors
	@$(VENV)/docs/bin/python -m sphinx -q -E -W --keep-going -d build/doctrees docs build/docs
	@echo "build/docs/index.html"

bench: $(VENV)/bench/.wheel ## Run the benchmarks, keep benchmarks/results.json, draw the plots
	@$(VENV)/bench/bin/python benchmarks/run.py $(BENCH_ARGS)

walk: $(VENV)/pythons ## Count the frames and files that a first call goes through, on real servers
	@$(MAKE) --no-print-directory walk-py$$(sed -n '1s/ .*//p' $(VENV)/pythons)

walk-py%: $(VENV)/py%/.wheel
	@$(VENV)/py$*/bin/python scripts/walk.py $(WALK_ARGS)

bench-growth: $(VENV)/bench/.wheel ## What a call costs with up to ten million keys: under half an hour, 8 GB of disk
	@$(VENV)/bench/bin/python benchmarks/bench_growth.py $(GROWTH_ARGS)

wheel: dist/.done ## Build dist/*.whl and the source distribution
	@ls dist

sbom: dist/.done ## Write dist/oncekey.cdx.json: what the package is made of and may install
	@$(BUILD) scripts/sbom.py dist/*.whl > dist/oncekey.cdx.json
	@echo dist/oncekey.cdx.json

clean: ## Remove environments, builds and caches
	rm -rf $(VENV) build dist .hypothesis .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# ---------------------------------------------------------------------------------- environments

# One pip, pinned, in the build environment serves all the others: they are made without their own.
BUILD := $(VENV)/build/bin/python
# Bytecode is written when a module is first imported: most of what is installed never is.
INSTALL = $(BUILD) -m pip --python $(@D)/bin/python install -qq --no-input --no-compile
oldest = $$(sed -n '1s/^[^ ]* //p' $(VENV)/pythons)
newest = $$(sed -n '$$s/^[^ ]* //p' $(VENV)/pythons)
exactly = $$(sed -n 's/^$(1) //p' $(VENV)/pythons)

# $(call environment,PYTHON,GROUPS): make or mend the environment that the stamp lies in.
define environment
	@echo "== preparing $(@D)"
	@"$(@D)/bin/python" -c '' 2>/dev/null || "$(1)" -m venv --clear --without-pip $(@D)
	@$(if $(2),$(INSTALL) -c constraints.txt $(2:%=--group %))
	@touch $@
endef

$(VENV)/pythons: scripts/pythons.py
	@mkdir -p $(@D)
	@for python in python3 python3.13 python3.12 python3.11 python; do \
	    if "$$python" -c '' 2>/dev/null; then "$$python" scripts/pythons.py >$@; exit; fi; \
	done; echo "No Python found: install Python 3.11 or newer." >&2; exit 1

$(VENV)/build/.deps: $(PINS) | $(VENV)/pythons
	@echo "== preparing $(@D)"
	@"$(BUILD)" -m pip --version >/dev/null 2>&1 || "$(oldest)" -m venv --clear $(@D)
	@$(BUILD) -m pip install -qq --no-input -c constraints.txt --upgrade pip
	@$(BUILD) -m pip install -qq --no-input -c constraints.txt --group build
	@touch $@

$(VENV)/py%/.deps: $(PINS) $(VENV)/build/.deps
	@grep -q '^$* ' $(VENV)/pythons || { echo "Python $* was not found; there are:" \
	    $$(sed 's/ .*//' $(VENV)/pythons) >&2; exit 1; }
	$(call environment,$(call exactly,$*),test sdks)

# Paddle's SDK brings a package called tests, which would hide ours: a directory of its own.
$(VENV)/paddle/.done: $(PINS) $(VENV)/build/.deps
	@rm -rf $(@D)
	@$(BUILD) -m pip install -qq --no-input --no-deps -c constraints.txt --target $(@D) paddle-python-sdk
	@touch $@

$(VENV)/check/.deps: $(PINS) $(VENV)/build/.deps
	$(call environment,$(oldest),check test)

$(VENV)/browser/.deps: $(PINS) $(VENV)/build/.deps
	$(call environment,$(oldest),test browser)

$(VENV)/brokers/.deps: $(PINS) $(VENV)/build/.deps
	$(call environment,$(oldest),test brokers)

$(VENV)/api/.deps: $(PINS) $(VENV)/build/.deps
	$(call environment,$(oldest),api)

# Without npm the tests that need it are skipped; in CI they fail.
$(VENV)/axe/.done:
	@mkdir -p $(@D)
	@npm install --silent --no-audit --no-fund --prefix $(@D) axe-core@4.14.0 || echo "axe-core: no npm here"
	@touch $@

$(VENV)/docs/.deps: $(PINS) $(VENV)/build/.deps
	$(call environment,$(oldest),docs)

$(VENV)/bench/.deps: $(PINS) $(VENV)/build/.deps
	$(call environment,$(newest),bench)

$(VENV)/demo/.deps: $(PINS) $(VENV)/build/.deps
	$(call environment,$(newest),demo)

# ----------------------------------------------------------------------------------------- wheel

build/wheel/.done: $(SOURCES) pyproject.toml $(VENV)/build/.deps
	@rm -rf $(@D)
	@$(BUILD) -P -m build -q --no-isolation --wheel --outdir $(@D) .
	@touch $@

# The time in the archives is the commit's, so that anybody can build the same bytes again.
dist/.done: $(SOURCES) pyproject.toml $(VENV)/build/.deps
	@rm -rf $(@D)
	@SOURCE_DATE_EPOCH=$${SOURCE_DATE_EPOCH:-$$(git log -1 --format=%ct 2>/dev/null || echo 1577836800)} \
	    $(BUILD) -P -m build -q --no-isolation --outdir $(@D) .
	@touch $@

$(VENV)/%/.wheel: build/wheel/.done $(VENV)/%/.deps
	@$(INSTALL) --no-index --no-deps --force-reinstall build/wheel/*.whl
	@touch $@

# One process compiles what the tests import, instead of every worker at the same time.
$(VENV)/py%/.primed: $(VENV)/py%/.deps | $(VENV)/py%/.wheel
	@$(@D)/bin/python -m pytest -q --collect-only -p no:cacheprovider >/dev/null 2>&1 || true
	@touch $@

.PRECIOUS: $(VENV)/py%/.deps $(VENV)/py%/.primed $(VENV)/%/.wheel
