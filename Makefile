# make train: set up .venv and train the recipe `tiny`; make test: set up the same way and run the tests; make
# test-slow: storms of kills and signals, and more of what make test has one of each kind of; make test-slurm and make
# test-hosts: a real Slurm cluster, and two hosts, made on this machine, as root; make test-page: report.html in a
# real browser, which it installs as root; make test-cloud: runs and data in a bucket of an S3 server on this machine;
# make docs: the pages of docs/ as a site, in site/.
# Add overrides with ARGS, choose the interpreter with PYTHON: make train PYTHON=python3.12 ARGS="trainer.steps=100"

PYTHON ?= python3
PROCESSES ?= 2
ARGS ?=
# One more than the cores of CI, as many tests wait.
TEST_PROCESSES ?= 3
IN_PARALLEL := --numprocesses=$(TEST_PROCESSES) --dist=loadfile --no-loadscope-reorder
BIN := .venv/bin
# pip alone compiles on one core, and tests of packages too; some packages have templates that are no Python.
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-compile --editable
COMPILE := $(BIN)/python -m compileall -q -j 0 -x '/tests?/' .venv/lib >/dev/null 2>&1 || true
# Two targets may install at once, and apt does not wait for itself.
APT_INSTALL := flock .venv sh -c 'apt-get update --quiet=2 && DEBIAN_FRONTEND=noninteractive apt-get install --quiet=2 \
	--yes --no-install-recommends "$$@" >/dev/null' apt

# Where it is set, each of hundreds of interpreters would compile our modules again, and pytest the tests.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: train test pytest test-slow test-slurm test-hosts test-page test-cloud storm lint docs clean

train: .venv/.ready
	$(BIN)/python train.py launch=local launch.processes=$(PROCESSES) $(ARGS)

test: lint pytest

pytest: .venv/.ready-dev
	$(BIN)/python -m pytest $(IN_PARALLEL) $(ARGS)

test-slow: .venv/.ready-export
	$(BIN)/python -m pytest -m slow $(IN_PARALLEL) $(ARGS)

# Slurm comes from Debian's packages, and its nodes are network namespaces: both need root. Elsewhere the tests skip.
test-slurm: .venv/.ready-dev
	@if command -v slurmctld >/dev/null && command -v slurmd >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		$(APT_INSTALL) slurm-wlm iproute2; \
	else echo "no Slurm here, and no apt-get as root to install it: its tests skip"; fi
	$(BIN)/python -m pytest -m slurm tests/cli/test_slurm.py $(ARGS)

test-hosts: .venv/.ready-dev
	@if command -v ip >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		$(APT_INSTALL) iproute2; \
	else echo "no ip here, and no apt-get as root to install it: tests of hosts skip"; fi
	$(BIN)/python -m pytest -m hosts tests/cli/test_hosts.py $(ARGS)

# The browser is Debian's. Elsewhere, and where there is none, what needs it skips.
test-page: .venv/.ready-dev
	@if command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null; \
	then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		$(APT_INSTALL) chromium; \
	else echo "no Chromium here, and no apt-get as root to install it: what needs it skips"; fi
	$(BIN)/python -m pytest -m page tests/cli/test_page.py $(ARGS)

# On the S3 server moto, through a proxy that cuts, delays and refuses; Azurite, which emulates Azure, comes from npm.
# Slow tests of buckets are among those of test-slow.
test-cloud: .venv/.ready-dev
	@if command -v azurite-blob >/dev/null || [ -x .venv/azurite/node_modules/.bin/azurite-blob ]; then :; \
	elif command -v npm >/dev/null && \
		npm install --silent --no-audit --no-fund --prefix .venv/azurite azurite@3.35.0 >/dev/null; then :; \
	else echo "no Azurite here, and no npm to install it: tests of Azure skip"; fi
	PATH="$(CURDIR)/.venv/azurite/node_modules/.bin:$$PATH" \
		$(BIN)/python -m pytest -m 'cloud and not slow' --numprocesses=2 --dist=loadfile $(ARGS)

# All kills, about 10 minutes.
storm: .venv/.ready-dev
	$(BIN)/python -m testing.bucket_storm kills=200 zombies=20 races=20 lanes=3 $(ARGS)
	$(BIN)/python -m testing.recovery_storm kills=200

lint: .venv/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

# Fails at a broken link or anchor, and at a page that is missing in mkdocs.yml.
docs: .venv/.ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --site-dir site

clean:
	rm -rf .venv site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: serried needs Python 3.11 or newer, $(PYTHON) is %d.%d; use: make PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv .venv

.venv/.ready: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) .
	@$(COMPILE)
	@touch $@

.venv/.ready-dev: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) '.[dev]'
	@$(COMPILE)
	@touch $@ .venv/.ready

.venv/.ready-export: .venv/.ready-dev
	$(INSTALL) '.[export]'
	@$(COMPILE)
	@touch $@

.venv/.ready-docs: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) '.[docs]'
	@touch $@

# All at once: versions are resolved, and modules compiled, once.
.venv/.ready-all: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) '.[dev,docs,export]'
	@$(COMPILE)
	@touch .venv/.ready .venv/.ready-dev .venv/.ready-export .venv/.ready-docs $@
