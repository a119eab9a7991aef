# Each target does all the set-up itself: it builds the environment that it needs once and reuses it.

VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
# Newer releases of vLLM, the second of which is on top of the first, and the newest PyTorch that megatron-core runs on;
# the versions in .venv are those of one GPU machine.
ENGINE_VENV := .venv-vllm
ENGINE_READY := $(ENGINE_VENV)/.ready
NEWEST_ENGINE_VENV := .venv-vllm-0.33
NEWEST_ENGINE_READY := $(NEWEST_ENGINE_VENV)/.ready
TORCH_VENV := .venv-torch
TORCH_READY := $(TORCH_VENV)/.ready
# mkdocs and its theme.
DOCS_VENV := .venv-docs
DOCS_READY := $(DOCS_VENV)/.ready

# A Python 3.12 to build .venv with; empty means: look on PATH and in pyenv.
PYTHON ?=
PYTEST_ARGS ?=
# How many tests run at a time, at most: each of those that train or serve starts several processes.
TEST_WORKERS ?= 4
QUICKSTART_ARGS ?=
GRPO_ARGS ?=

# For the benchmark: it runs with a Python that has PyTorch for GPUs and Transformer Engine, which .venv has not.
GPU_PYTHON ?= python3
GPUS ?= 4
BENCH_ARGS ?=

# Several tests at a time; what shares trainings or engines stays together.
PYTEST := -m pytest -n logical --maxprocesses $(TEST_WORKERS) --dist loadgroup --no-loadscope-reorder
RUN_TESTS := OMP_NUM_THREADS=1 $(PY) $(PYTEST)
# Those in which an engine may be of another environment than the trainer, and those that run in the engine's.
ENGINE_TESTS := $(addprefix tests/integration/test_live_,http.py contract.py fp8.py)
ENGINE_UNIT_TESTS := $(addprefix tests/unit/refit/,test_vllm_*.py test_engine_refusals.py test_attention_refresh.py)

# Tests start hundreds of processes. If containers forbid bytecode files, as many do, each would compile the sources anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help quickstart grpo test test-all test-vllm test-newest-torch bench-train docs lint types format venv clean

help:
	@echo 'make quickstart   train a small model on 4 processes, export it, generate text (no GPU needed)'
	@echo 'make grpo         reinforcement learning with a live vLLM on the CPU; GRPO_ARGS=--stale compares with no pushes'
	@echo 'make test         run the quick tests on the CPU; PYTEST_ARGS="-k layout" chooses some, TEST_WORKERS=4 at a time'
	@echo 'make test-all     run all tests on the CPU, and test-vllm; with PYTEST_ARGS="-k layout" only those that it chooses'
	@echo 'make test-vllm    run the live tests with vLLM 0.32 and 0.33, in environments of their own'
	@echo 'make test-newest-torch   run the quick tests of the trainer with the newest PyTorch'
	@echo 'make bench-train  time a training step on GPUs, into bench-out; GPUS=4 GPU_PYTHON=python3'
	@echo 'make docs         build the documentation site into site/, and check its links'
	@echo 'make lint         check style (ruff)'
	@echo 'make types        check types (mypy)'
	@echo 'make format       reformat the sources and apply the safe fixes'
	@echo 'make venv         only build .venv; PYTHON=/path/to/python3.12 names the interpreter'
	@echo 'make clean        remove all environments, caches, build and quick-start output'

# Rebuilt when what they are made from changes. One rule each, so that `make -j` builds them once.
$(READY): requirements/ci.lock setup.py pyproject.toml .ci/make-venv .ci/find-python
	@sh .ci/make-venv $(VENV) trainer "$(PYTHON)"
	@touch $@

$(ENGINE_READY): requirements/vllm-0.32.lock setup.py pyproject.toml .ci/make-venv .ci/find-python
	@sh .ci/make-venv $(ENGINE_VENV) engine "$(PYTHON)"
	@touch $@

$(NEWEST_ENGINE_READY): $(ENGINE_READY) requirements/vllm-0.33.txt .ci/put_over_kernels.py
	@sh .ci/make-venv $(NEWEST_ENGINE_VENV) newest-engine "$(PYTHON)"
	@touch $@

$(TORCH_READY): requirements/newest-torch.txt requirements/ci.lock setup.py pyproject.toml .ci/make-venv .ci/find-python
	@sh .ci/make-venv $(TORCH_VENV) newest-torch "$(PYTHON)"
	@touch $@

$(DOCS_READY): requirements/docs.lock .ci/make-venv .ci/find-python
	@sh .ci/make-venv $(DOCS_VENV) docs "$(PYTHON)"
	@touch $@

venv: $(READY)

quickstart: $(READY)
	@$(PY) -m examples.quickstart $(QUICKSTART_ARGS)

grpo: $(READY)
	@$(PY) -m examples.grpo $(GRPO_ARGS)

test: $(READY)
	@$(RUN_TESTS) --quick $(PYTEST_ARGS)

test-all: $(READY)
	@$(RUN_TESTS) $(PYTEST_ARGS)
ifeq ($(PYTEST_ARGS),)
	@$(MAKE) --no-print-directory test-vllm
endif

test-vllm: $(READY) $(NEWEST_ENGINE_READY)
	@for engine in $(ENGINE_VENV)/bin/python $(NEWEST_ENGINE_VENV)/bin/python; do \
		OMP_NUM_THREADS=1 $$engine -m pytest -q $(ENGINE_UNIT_TESTS) && \
		$(RUN_TESTS) --engine-python $$engine $(ENGINE_TESTS) $(PYTEST_ARGS) || exit 1; \
	done

test-newest-torch: $(TORCH_READY)
	@OMP_NUM_THREADS=1 $(TORCH_VENV)/bin/python $(PYTEST) --quick $(PYTEST_ARGS)

bench-train:
	@PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" \
		$(GPU_PYTHON) -m benchmarks.run_all --gpus $(GPUS) --out bench-out $(BENCH_ARGS)

docs: $(DOCS_READY)
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --strict --clean
	@echo 'site/index.html'

lint: $(READY)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

types: $(READY)
	@$(PY) -m mypy

format: $(READY)
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

clean:
	rm -rf $(VENV) $(ENGINE_VENV) $(NEWEST_ENGINE_VENV) $(TORCH_VENV) $(DOCS_VENV) site build dist *.egg-info quickstart-out grpo-out bench-out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find benchmarks etp megatron_patches tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
