# Two commands on a fresh machine: `make drill` for a first packet, `make test` for everything we check.
#
# PYTHON    the interpreter that the venv is made with
# VENV      where the venv is
# E2E_JOBS  tests side by side (an end-to-end test starts 2 to 4 processes)

PYTHON ?= python3
VENV ?= .venv
E2E_JOBS ?= 2
# The part of the corpus that `make test` drills; `make corpus` drills all of it.
CORPUS_SAMPLE ?= o01 o09 o13 o27 c1 c2 c3 c4 t-sum t-hand-tensor t-dropout-summed

BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEEPSPEED := $(VENV)/.deepspeed
CONSTRAINTS := tests/constraints.txt

.DELETE_ON_ERROR:
.PHONY: drill test thorough lint bench corpus deepspeed matrix picture clean

# Prints every verdict and where the packet is.
drill: $(READY)
	@$(BIN)/ckptdrill run matrices/quickstart.yaml

test: lint deepspeed
	$(BIN)/python -m pytest -q -n $(E2E_JOBS)
	$(BIN)/python -m pytest -q -m '(e2e or slow) and not thorough' -n $(E2E_JOBS) --dist loadfile \
		--durations 25
	$(BIN)/python tests/corpus/run.py --jobs 2 $(CORPUS_SAMPLE)

# More of what `make test` does a sample of: all seeds, precisions and mutations.
thorough: $(READY)
	$(BIN)/python -m pytest -q -m thorough -n $(E2E_JOBS)

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# Each benchmark is a program that prints its own table.
bench: $(READY)
	@for program in tests/benchmarks/bench_*.py; do $(BIN)/python $$program || exit; done

# The constraints name torch exactly, so that a local CPU wheel of it is taken where pip knows one.
$(READY): pyproject.toml $(CONSTRAINTS)
	@echo "installing into $(VENV) (a few minutes when torch has to be fetched)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--editable '.[jobs,dev]' --constraint $(CONSTRAINTS)
	@touch $@

# Apart from the rest, since a first verdict does not need it. Nothing of it is compiled.
deepspeed: $(DEEPSPEED)

$(DEEPSPEED): $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check setuptools \
		--constraint $(CONSTRAINTS)
	@DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--no-build-isolation deepspeed --constraint $(CONSTRAINTS)
	@touch $@

# Real resume mistakes and healthy jobs, each a small script: what is caught, missed, wrongly accused.
corpus: $(READY)
	@$(BIN)/python tests/corpus/run.py

# The picture of the README, from a run of its own. Needs a Chromium: apt-get install chromium
picture: $(READY)
	@$(BIN)/ckptdrill run matrices/quickstart.yaml --runs build/picture
	@$(BIN)/python tests/packet/picture.py build/picture/quickstart/latest matrices/quickstart.png

# Every matrix that a CPU can carry; what came out goes into the README.
matrix: $(READY) deepspeed
	@$(BIN)/python tests/matrices/run.py

# Everything that can be made again; run folders are evidence and stay.
clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find ckptdrill drills tests -name __pycache__ -type d -prune -exec rm -rf {} +
