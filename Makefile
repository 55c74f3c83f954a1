# Every target sets up what it needs; `make` alone lists them.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup train language test test-quick test-changed test-scripts test-all fuzz check trackers trainers release bench gpu-check \
	docs docs-serve clean

# processes of `make train`, and what is handed on to it:  make train NP=4 ARGS="topology=torus seed=2"
# FT=1: the run may go on without processes that it loses
NP ?= 8
ARGS ?=
FT ?=
# Python with torch, of `make gpu-check`
PYTHON ?= $(shell command -v python3 || command -v python)
# commit of `make test-changed`
SINCE ?= HEAD
# length of `make fuzz`, in seconds
SECONDS ?= 60
# port of `make docs-serve`
PORT ?= 8000

activate := source .venv/bin/activate

# Tests: first all for one process, on all cores; then those for several, under one mpirun each.
PROCESSES ?= 2 4
# Some are repeated with torch.distributed in place of MPI. (PyTorch's hooks use it in any case, and
# tests/optimizers/test_training_loops.py has every optimizer in a process group.)
GLOO ?= 2
of_torch_distributed := algorithms gossip_optimizer layouts network torchrun
# Tests of scripts and documents are a target of their own.
scripts := $(addprefix tests/,benchmarks docs environment experiments)
chosen := $(addprefix --ignore=,$(scripts))
pytest_on_all_cores := python -m pytest -n auto --maxprocesses 8 --dist worksteal
# Bytecode is kept, or every process would compile the tests again.
test_environment := export OMP_NUM_THREADS=1; unset PYTHONDONTWRITEBYTECODE; { [ -t 1 ] || export PY_COLORS=0; }
run_tests = $(activate) && $(test_environment) && failed= && \
	{ $(pytest_on_all_cores) -m '$(1)' $(chosen) || failed=1; } && \
	for n in $(PROCESSES); do \
		echo "── $$n MPI processes ──"; \
		mpirun -np $$n python -m pytest -q -m '$(1)' $(chosen) || failed="$$failed $$n"; \
	done && \
	for n in $(GLOO); do \
		echo "── $$n processes of torch.distributed ──"; \
		mpirun -np $$n python -m pytest -q -m '$(1)' --transport gloo \
			$(patsubst %,tests/*/test_%.py,$(of_torch_distributed)) || \
			failed="$$failed $$n (gloo)"; \
	done && \
	{ [ -z "$$failed" ] || { echo "tests failed under$${failed} MPI processes" >&2; exit 1; }; }

help: ## this list
	@sed -n 's/^\([a-z-]*\): .*## /make \1\t/p' Makefile | expand -t 18

setup: ## make .venv, once
	@bash environment/setup.sh

train: setup ## train with eight MPI processes; NP=4, ARGS="key=value …", FT=1: survive losses
	@$(activate) && mpirun -np $(NP) $(if $(FT),--with-ft ulfm) python train.py \
		$(if $(FT),on_worker_loss=continue) $(ARGS)

language: setup ## a GPT of a million parameters in rounds, 4 processes, some minutes; ARGS="key=value …"
	@$(activate) && mpirun -np 4 python train.py --config gpt/1m \
		num_epochs=4 max_steps_per_epoch=300 batch_size=2 \
		optimizer=power-gossip optimizer_rank=8 optimizer_num_iterations=1 \
		learning=diloco local_steps=30 \
		task_options.sample="def " $(ARGS)

test: setup ## the tests, in minutes: laws, programs, and 2 and 4 MPI processes
	@$(call run_tests,parallel[match] and not slow)

test-quick: setup ## laws of every registry, no MPI processes, programs or long tests: while you work
	@$(activate) && $(test_environment) && $(pytest_on_all_cores) --quick -m 'parallel[match]' $(chosen)

test-changed: setup ## those for one process that import what differs from SINCE=HEAD: while you work
	@$(activate) && $(test_environment) && \
	$(pytest_on_all_cores) --since '$(SINCE)' -m 'parallel[match] and not slow' $(chosen)

test-scripts: PROCESSES :=
test-scripts: GLOO :=
test-scripts: chosen := $(scripts)
test-scripts: setup ## the tests of experiments, benchmarks, documents and scripts
	@$(call run_tests,parallel[match] and not slow)

test-all: PROCESSES += 3 8
test-all: GLOO += 4
test-all: of_torch_distributed += dgc error_feedback gossip_hook powersgd sign_sgd \
	training_loops
test-all: chosen :=
test-all: setup trackers trainers release ## all tests, also every case of the long tables: before a release
	@$(call run_tests,parallel[match])

fuzz: setup ## random failures, on the virtual clock and in processes; SECONDS=600
	@$(activate) && export OMP_NUM_THREADS=1 && python -m tests.harness.fuzz --seconds $(SECONDS)

trackers: extras := wandb
trackers: setup ## Weights & Biases: test-all leaves its test out without it
trainers: extras := trainers
trainers: setup ## accelerate, Lightning and transformers, 190 MB: the same for their examples
trackers trainers:
	@$(activate) && python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
		-c environment/constraints.txt --editable '.[$(extras)]' || \
	echo "the $@ could not be installed: their tests are left out" >&2

check: setup ## formatting, lint, types
	@$(activate) && ruff format --check . && ruff check . && mypy

bench: setup ## milliseconds a step under mpirun and torchrun, beside lower bounds and PyTorch
	@$(activate) && python -m benchmarks.steps

gpu-check: ## results on a GPU are those of a CPU, without setup; PYTHON=…, ARGS="--device cpu"
	@PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 "$(PYTHON)" -m pytest -m gpu -p tests.harness.device -p no:cacheprovider \
		--confcutdir=tests/gpu -o addopts=--import-mode=importlib tests/gpu $(ARGS)

docs: setup ## the documentation site, in docs/_build/html; warnings are errors
	@$(activate) && python -m sphinx -W --keep-going -d docs/_build/doctrees docs docs/_build/html && \
	touch docs/_build/html/index.html && python -m pytest -q tests/docs/test_site.py && \
	echo "docs/_build/html/index.html"

docs/_build/html/index.html:
	@$(MAKE) docs

docs-serve: docs/_build/html/index.html ## the site of the last `make docs` at http://localhost:8000; PORT=…
	@$(activate) && python -m http.server --bind 127.0.0.1 --directory docs/_build/html $(PORT)

clean: ## remove .venv, builds and caches; keeps output/ and data/
	rm -rf .venv build docs/_build docs/_generated docs/_tutorials *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
