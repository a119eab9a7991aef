# `make quickstart` and `make test` do all the set-up themselves: they build .venv once and reuse it.

VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready

# A Python 3.12 to build .venv with; empty means: look on PATH and in pyenv.
PYTHON ?=
PYTEST_ARGS ?=
# How many tests run at a time, at most: each of those that train or serve starts several processes.
TEST_WORKERS ?= 4
QUICKSTART_ARGS ?=

# For the benchmark: it runs with a Python that has PyTorch for GPUs and Transformer Engine, which .venv has not.
GPU_PYTHON ?= python3
GPUS ?= 4
BENCH_ARGS ?=

.PHONY: help quickstart test bench-train lint types format venv clean

help:
	@echo 'make quickstart   train a small model on 4 processes, export it, generate text (no GPU needed)'
	@echo 'make test         run the tests on the CPU; PYTEST_ARGS="-k layout" chooses some, TEST_WORKERS=4 at a time'
	@echo 'make bench-train  time a training step on GPUs, into bench-out; GPUS=4 GPU_PYTHON=python3'
	@echo 'make lint         check style (ruff)'
	@echo 'make types        check types (mypy)'
	@echo 'make format       reformat the sources and apply the safe fixes'
	@echo 'make venv         only build .venv; PYTHON=/path/to/python3.12 names the interpreter'
	@echo 'make clean        remove .venv, caches, build and quick-start output'

# Rebuilt when what it is made from changes. One rule, so that `make -j` builds it once.
$(READY): requirements/ci.lock setup.py pyproject.toml .ci/make-venv .ci/find-python
	@sh .ci/make-venv $(VENV) $(PYTHON)
	@touch $@

venv: $(READY)

quickstart: $(READY)
	@$(PY) -m examples.quickstart $(QUICKSTART_ARGS)

test: $(READY)
	@OMP_NUM_THREADS=1 $(PY) -m pytest -n logical --maxprocesses $(TEST_WORKERS) --dist loadgroup \
		--no-loadscope-reorder $(PYTEST_ARGS)

bench-train:
	@PYTHONPATH="$(CURDIR):$(CURDIR)/transformer_engine$${PYTHONPATH:+:$$PYTHONPATH}" \
		$(GPU_PYTHON) -m benchmarks.run_all --gpus $(GPUS) --out bench-out $(BENCH_ARGS)

lint: $(READY)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

types: $(READY)
	@$(PY) -m mypy

format: $(READY)
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info quickstart-out bench-out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find benchmarks megatron_patches transformer_engine tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
