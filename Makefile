# `make` lists what there is. Needs python3 >= 3.11, GNU make >= 3.81 and a package index; all else goes to .venv.
#
#   make test DEVICE=cuda                run the tests on a GPU
#   make pytest PY=python3 DEVICE=cuda   only pytest, with an interpreter that has everything: nothing is set up
#   make demo ARGS='--seed 7'            pass anything else on to the command behind a target
#   make setup PYTHON=python3.13         choose the interpreter that .venv is made from

PYTHON := python3
VENV   := .venv
VENVPY := $(VENV)/bin/python
PY     := $(VENVPY)
STAMP  := $(VENV)/.set-up
CORE   := $(VENV)/.core
DEVICE :=
ARGS   :=

# An interpreter named on the command line is used as it is.
ifeq ($(PY),$(VENVPY))
READY := $(CORE)
endif

# Where pytest-xdist is there the tests share the cores; a GPU too, of which each process takes up to 2 GiB.
CORES    = len(os.sched_getaffinity(0))
MOST     = $(if $(filter cuda%,$(DEVICE)),min(12, torch.cuda.mem_get_info()[1] >> 31),4)
PARALLEL = $(shell $(PY) -c 'import os, torch, xdist; print("-n", min($(MOST), $(CORES)), "--dist loadfile --no-loadscope-reorder")' 2>/dev/null)

ON_DEVICE := $(if $(DEVICE),--device $(DEVICE))
PIP := $(VENVPY) -m pip --disable-pip-version-check --quiet install --constraint constraints.txt

# The tests start a hundred processes, and pytest rewrites every test: without byte code both compile it all each time.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo disaggregated transformers exact traffic test nightly lint format types docs pytest fuzz mutants bench gpu peers wheel pins clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

setup: $(CORE)  ## make .venv: torch, the pinned tools, batchstate itself (editable), its core compiled
	@:

# torch goes first and alone: with its version settled, nothing installed later can bring another build of it.
$(STAMP): constraints.txt pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "batchstate: no '$(PYTHON)' found; install Python 3.11 or newer, or name one: make $(MAKECMDGOALS) PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "batchstate: needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1); name another: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(VENVPY) -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo "set-up 1/5: $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
	@echo "set-up 2/5: torch (once; large)"
	@$(PIP) "$$(grep '^torch==' constraints.txt)"
	@echo "set-up 3/5: build backend"
	@$(PIP) cython setuptools
	@echo "set-up 4/5: batchstate and its tools"
	@BATCHSTATE_COMPILED=0 $(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@

# Without a compiler this builds nothing and succeeds, unless BATCHSTATE_COMPILED=1. BATCHSTATE_COMPILED=0 is for what runs.
LOG := $(VENV)/core.log
$(CORE): batchstate/_core.py setup.py $(STAMP)
	@echo "set-up 5/5: the core"
	@rm -f batchstate/_core.*.so
	@test "$$BATCHSTATE_COMPILED" != 0 || unset BATCHSTATE_COMPILED; \
	  $(VENVPY) setup.py --quiet build_ext --inplace --force >$(LOG) 2>&1 || { cat $(LOG) >&2; exit 1; }
	@test -e batchstate/_core.abi3.so && echo "batchstate: the core is compiled" || \
	  echo "batchstate: the core is interpreted, and steps are slower ($(LOG) says why); install a C compiler, then: make -B setup"
	@touch $@

demo: $(READY)  ## a real model served one step ahead, every token compared with model.generate
	@$(PY) -m examples.engine $(ON_DEVICE) $(ARGS)

disaggregated: $(READY)  ## prefill in one process, decode in another, KV written straight across
	@$(PY) -m examples.disaggregated $(ON_DEVICE) $(ARGS)

transformers: $(READY)  ## transformers' continuous batching, with its state on batchstate
	@$(PY) -m examples.transformers_batching $(ON_DEVICE) $(ARGS)

exact: $(READY)  ## a model whose text says whether the state was right, in each engine that is there
	@$(PY) -m examples.exact $(ARGS)

traffic: $(READY)  ## an hour of requests through an engine that lacks only the model
	@$(PY) -m examples.traffic --checks cheap $(ON_DEVICE) $(ARGS)

# Types and docs side by side: each is checked by one process.
test: lint  ## everything CI runs: lint, types, docs, tests
	@$(MAKE) --no-print-directory docs & docs=$$!; $(MAKE) --no-print-directory types; types=$$?; wait $$docs && exit $$types
	@$(MAKE) --no-print-directory pytest

lint: $(READY)  ## ruff: rules and format; codespell: spelling
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m codespell_lib README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md $(wildcard docs/*.md docs/*/*.md) batchstate benchmarks examples tests

format: $(READY)  ## ruff: repair what can be repaired
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

types: $(READY)  ## mypy, strict
	$(PY) -m mypy

# -E reads every page anew: a page read before keeps its warnings to itself.
docs: $(READY)  ## the documentation as HTML in docs/_build/html; a warning is an error
	$(PY) -m sphinx -q -E -W --keep-going -n -b html docs docs/_build/html

pytest: $(READY)  ## tests and the documentation's examples
	$(PY) -m pytest $(ON_DEVICE) $(PARALLEL) $(ARGS)

nightly: $(READY)  ## every test: those of benchmarks and examples too, sweeps and long runs included
	$(PY) -m pytest $(ON_DEVICE) $(PARALLEL) -m "" tests benchmarks/tests examples/tests $(ARGS)

fuzz: $(READY)  ## look for a batch history that breaks an invariant
	@$(PY) -m tests.selfcheck fuzz $(ON_DEVICE) $(ARGS)

mutants: $(READY)  ## switch real bugs on, one at a time, and show which invariant finds each
	@$(PY) -m tests.selfcheck mutants $(ON_DEVICE) $(ARGS)

bench: $(READY)  ## measure what the operations and the checks cost
	@$(PY) -m benchmarks $(ON_DEVICE) $(ARGS)

gpu: $(READY)  ## what only a GPU can show, in ten minutes; ARGS='--json FILE' keeps every figure
	@$(PY) -m benchmarks.gpu $(ON_DEVICE) $(ARGS)

# Released engines without their dependencies, in an environment of their own. torch goes first, as above.
PEERS := .venv-peers
peers:  ## watch SGLang, vLLM, LMDeploy, Tokasaurus as released, then with a statement less; BATCHSTATE_PEERS=DIR: checkouts of TGI, exllamav3; ARGS='--json FILE'
	@test -x $(PEERS)/bin/python || { echo "set-up: $(PEERS)"; $(PYTHON) -m venv $(PEERS); }
	@$(PEERS)/bin/python -m pip --disable-pip-version-check --quiet install --constraint constraints.txt "$$(grep '^torch==' constraints.txt)"
	@$(PEERS)/bin/python -m pip --disable-pip-version-check --quiet install --constraint constraints.txt '.[testing,engine,triton]' aiohttp msgspec pillow pydantic requests
	@$(PEERS)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps sglang==0.5.23 vllm==0.33.0 lmdeploy==0.18.0 tokasaurus==0.0.4
	@$(PEERS)/bin/python -W ignore -m benchmarks.adoption $(ARGS)
	@$(PEERS)/bin/python -W ignore -m benchmarks.adoption.streams
	@$(PEERS)/bin/python -W ignore -m benchmarks.adoption.controllers
	@$(PEERS)/bin/python -W ignore -m benchmarks.adoption.kernels --table
	@$(PEERS)/bin/python -W ignore -m benchmarks.adoption.sweep

wheel: $(READY)  ## sdist and wheel in dist/; BATCHSTATE_COMPILED=0 for one without the compiled core
	BATCHSTATE_COMPILED=$${BATCHSTATE_COMPILED:-1} $(PY) -m build --no-isolation --outdir dist

pins:  ## refresh constraints.txt with the newest releases (torch keeps its version)
	@sh .ci/refresh-pins "$(PYTHON)"

clean:  ## remove everything made here, .venv too; keeps the examples that hypothesis found
	rm -rf $(VENV) $(PEERS) batchstate/_core.*.so batchstate.egg-info build dist docs/_build docs/reference/api .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
