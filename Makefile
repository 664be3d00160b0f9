# make train   creates .venv, installs, and trains a small GPT on all cores of this machine
# make test    ruff, mypy, the docs and the whole test suite, two tests at a time
# make quick   ruff, mypy and the tests that find most mistakes: less than 90 s on 2 cores
# make docs    builds the docs into build/docs; open build/docs/index.html
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Without OMP_NUM_THREADS, because nproc would print that number instead of the number of cores.
CORES := $(shell env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc 2>/dev/null || sysctl -n hw.ncpu)
INSTALLED := $(VENV)/.installed
# More than two tests at a time would disturb the tests that measure time.
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist worksteal
JOBS ?= 2
QUICK := tests/unit tests/contract/test_comm.py $(addprefix tests/process/test_,join.py run_workers.py ddp.py survive.py launch.py)

.PHONY: train test quick lint docs bench chaos gpu clean chaos-gpu
.DELETE_ON_ERROR:

train: $(INSTALLED)
	$(BIN)/lockstep run -n $(CORES) examples/train_gpt.py $(ARGS)

test: lint docs
	$(PYTEST) $(ARGS)

quick: lint
	$(PYTEST) -m "not slow" $(QUICK) $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check -q .
	$(BIN)/mypy

# Warnings are errors, and so are references that lead nowhere (-n).
docs: $(INSTALLED)
	$(BIN)/python -m sphinx -q -W --keep-going -n -d build/doctrees docs build/docs

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks.step

# A thousand random fault schedules against real runs and two hundred against runs on three hosts, two at a time, and ten thousand
# damaged checkpoints: about two and a half hours. Then 40 workers that are slow on purpose: a quarter of an hour.
chaos: $(INSTALLED)
	$(BIN)/python -m tests.fuzz 0 10000
	$(BIN)/python -m tests.chaos 0 1000 --jobs 2
	$(BIN)/python -m tests.machine_chaos 0 200 --jobs 2
	$(BIN)/python -m tests.straggler_cases

# On a machine with a GPU, with whatever torch it has: nothing is installed.
gpu:
	PYTHONPATH=src:. $(PYTHON) tests/gpu/run.py

# There too: a hundred random fault schedules over NCCL, four at a time: about five minutes.
chaos-gpu:
	PYTHONPATH=src:. $(PYTHON) -m tests.chaos_gpu 0 100 --jobs 4 $(ARGS)

# torch first and alone: exactly this spelling finds a CPU build where one is offered
$(INSTALLED): pyproject.toml constraints-dev.txt
	$(PYTHON) -c 'import sys; sys.exit("Lockstep needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check $$(grep '^torch==' constraints-dev.txt)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints-dev.txt -e '.[dev,docs,frameworks,ray]'
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
