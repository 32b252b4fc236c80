# tutti: everything a newcomer or a developer runs. `make help` lists it.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory --no-builtin-rules

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The first of these that is Python 3.11 or newer makes the virtual environment; `make PYTHON=...` chooses another.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& { echo $$p; break; }; done)
CHECKED := src tests examples benchmarks
DEMO_RUN := runs/demo
BIGEARTHNET := runs/bigearthnet
# Without an environment of its own, as on a machine without a network, the Python that has torch.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
# Many containers forbid to write bytecode; then every process of the tests compiles tutti, and pytest every test file.
test long matrix compat fuzz chaos soak: export PYTHONDONTWRITEBYTECODE :=
COMPAT = build/compat/torch-$(VERSION)-$(notdir $(PYTHON))

.PHONY: help demo demo-bigearthnet test long compat matrix fuzz chaos soak check lint spelling types house hooks docs bench plan-bench pays-bench gpu clean install

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 19

install: $(STAMP)  ## make the virtual environment and install tutti into it

$(STAMP): pyproject.toml constraints.txt
	@[ -n "$(PYTHON)" ] || { echo "tutti needs Python 3.11 or newer and found none: install it" \
		"(Debian, Ubuntu: apt install python3 python3-venv) or name it: make PYTHON=/path/to/python3.11"; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is" \
		"$$($(PYTHON) --version 2>&1), and tutti needs Python 3.11 or newer: name one with make PYTHON=..."; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments:" \
		"on Debian and Ubuntu, apt install python3-venv"; exit 2; }
	@echo "== installing into $(VENV) ($$($(PYTHON) --version))"
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet -c constraints.txt torch -e '.[dev]'
	@$(BIN)/python -c 'import torch; print("== installed: torch", torch.__version__)'
	@touch $@

demo: $(STAMP)  ## train a small GPT on 2 workers, verify it against one device, write the report
	@echo "== training a small GPT on this machine's own text, on 2 workers: tutti run --nproc 2 examples/gpt_tutti.py"
	@rm -rf $(DEMO_RUN)
	@$(BIN)/tutti run --nproc 2 --folder $(DEMO_RUN) examples/gpt_tutti.py
	@echo "== the same steps on one device and on 2 workers: tutti verify --nproc 2 examples/gpt_tutti.py"
	@$(BIN)/tutti verify --nproc 2 --folder $(DEMO_RUN) examples/gpt_tutti.py
	@echo "== the report: tutti report $(DEMO_RUN)"
	@$(BIN)/tutti report $(DEMO_RUN)
	@echo "== open $(CURDIR)/$(DEMO_RUN)/report/report.html"

demo-bigearthnet: $(STAMP)  ## the remote-sensing example: make patches, pack them, train on 2 workers, report (2 minutes)
	@rm -rf $(BIGEARTHNET)
	@echo "== patches in BigEarthNet's format: python examples/bigearthnet/generate.py $(BIGEARTHNET) --patches 400"
	@$(BIN)/python examples/bigearthnet/generate.py $(BIGEARTHNET) --patches 400
	@echo "== packed once: python examples/bigearthnet/pack.py $(BIGEARTHNET) $(BIGEARTHNET)/packed --splits ..."
	@$(BIN)/python examples/bigearthnet/pack.py $(BIGEARTHNET) $(BIGEARTHNET)/packed --splits $(BIGEARTHNET)/splits \
		--exclude $(BIGEARTHNET)/patches_with_seasonal_snow.csv
	@echo "== a narrow ResNet-50 with the published recipe, on 2 workers: tutti run --nproc 2 examples/bigearthnet/train_tutti.py"
	@$(BIN)/tutti run --nproc 2 --folder $(BIGEARTHNET)/run examples/bigearthnet/train_tutti.py $(BIGEARTHNET)/packed \
		--labels 19 --epochs 6 --batch-size 32 --lr 30 --width 16 --workers 1 --validate-every 2
	@echo "== the report: tutti report $(BIGEARTHNET)/run"
	@$(BIN)/tutti report $(BIGEARTHNET)/run
	@echo "== open $(CURDIR)/$(BIGEARTHNET)/run/report/report.html"

test: check  ## lint, types and tests (10 to 30 minutes on 2 cores)
	@echo "== tests"
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not long" --ignore tests/test_house.py --durations=15

long: $(STAMP)  ## the tests that `make test` leaves out, and those of GPU kernels, for which it installs Triton (PART=1/4: a quarter)
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m long --durations=15 $(if $(PART),--part $(PART))
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet -c constraints.txt -e '.[triton]'
	@$(BIN)/python -m pytest -q -n 2 tests/compression/test_gpu_kernels.py tests/compression/test_gpu_compiled.py

compat:  ## the tests in an environment of their own: make compat VERSION=2.11.0 (torch), PYTHON=python3.12, ONLY=tests/data
	@[ -n "$(VERSION)" ] || { echo "which torch? make compat VERSION=2.11.0"; exit 2; }
	@[ -x $(COMPAT)/bin/python ] || $(PYTHON) -m venv $(COMPAT)
	@{ grep -v '^torch==' constraints.txt; echo 'torch==$(VERSION)'; } >$(COMPAT)/constraints.txt
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(COMPAT)/bin/python -m pip install --quiet -c $(COMPAT)/constraints.txt torch -e '.[dev]'
	@$(COMPAT)/bin/python -c 'import platform, torch; print("== torch", torch.__version__, "on Python", platform.python_version())'
	@$(COMPAT)/bin/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not long" $(ONLY)

matrix: $(STAMP)  ## every kind of model by every plan against one device; writes docs/matrix.md (ONLY='Llama:split*': a part)
	@$(BIN)/python -W ignore::UserWarning:multiprocessing.resource_tracker tests/matrix/run.py \
		$(if $(ONLY),--only '$(ONLY)',--page docs/matrix.md --json docs/matrix.json)
	@$(if $(ONLY),true,$(BIN)/python -W ignore::UserWarning:multiprocessing.resource_tracker tests/matrix/checkpoints.py --page docs/matrix.md)

fuzz: $(STAMP)  ## bad inputs for an hour: make fuzz MINUTES=60 SEED=0; each finding says how to see it again
	@$(BIN)/python tests/fuzz/run.py --minutes $(or $(MINUTES),60) --seed $(or $(SEED),0)

chaos: $(STAMP)  ## random faults while runs train, and the laws after them: make chaos SEEDS=20, or MINUTES=60; FIRST=0
	@$(BIN)/python tests/chaos/run.py --first $(or $(FIRST),0) $(if $(MINUTES),--minutes $(MINUTES),--seeds $(or $(SEEDS),20))

soak: $(STAMP)  ## train for long with checkpoints and loader workers; nothing may grow: make soak STEPS=50000
	@$(BIN)/python tests/chaos/soak.py --steps $(or $(STEPS),50000)

check: lint spelling types house  ## lint, spelling, types and the house's rules: what the commit hooks run

lint: $(STAMP)  ## ruff: style and format
	@echo "== ruff"
	@$(BIN)/ruff check --quiet $(CHECKED)
	@$(BIN)/ruff format --check --quiet $(CHECKED) || { echo "run: $(BIN)/ruff format $(CHECKED)"; exit 1; }

spelling: $(STAMP)  ## codespell: code and documents
	@echo "== codespell"
	@$(BIN)/codespell $(CHECKED) docs README.md CONTRIBUTING.md CHANGELOG.md

house: $(STAMP)  ## the rules of size, layers and words (tests/test_house.py)
	@echo "== house"
	@$(BIN)/python -m pytest -q --no-header -p no:cacheprovider tests/test_house.py

hooks: $(STAMP)  ## run the same checks before every commit
	@$(BIN)/pre-commit install --hook-type pre-commit --hook-type commit-msg

docs: $(STAMP)  ## build the documents into site/, strictly: no broken link, no missing page
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "== open $(CURDIR)/site/index.html"

types: $(STAMP)  ## mypy, strict
	@echo "== mypy --strict"
	@$(BIN)/mypy --no-error-summary

bench: $(STAMP)  ## measure tutti against plain PyTorch; writes benchmarks/results (QUICK=1: a short look)
	@$(BIN)/python benchmarks/run.py $(if $(QUICK),--quick)

plan-bench: $(STAMP)  ## measure every plan between 2 hosts of a lab beside its prediction (root, some three hours; QUICK=1, RESUME=1)
	@$(BIN)/python benchmarks/run.py plan $(if $(QUICK),--quick) $(if $(RESUME),--resume)

pays-bench: $(STAMP)  ## time to a quality between hosts of a lab, beside DDP and peers (root, 25 minutes; QUICK=1, RESUME=1)
	@$(BIN)/python benchmarks/run.py pays $(if $(QUICK),--quick) $(if $(RESUME),--resume)

gpu:  ## what one GPU can prove: make gpu ONLY=correct,speed WHEELS=folder (REHEARSE=1: the same code on the CPU)
	@$(GPU_PYTHON) benchmarks/gpu.py $(ONLY) $(if $(REHEARSE),--rehearse) $(if $(WHEELS),--wheels $(WHEELS))

clean:  ## remove the virtual environment, caches and runs
	@rm -rf $(VENV) runs build site src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
