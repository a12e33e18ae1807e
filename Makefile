# Two commands on a fresh machine: `make drill` for a first packet, `make test` for everything we check.
#
# PYTHON    the interpreter that the venv is made with
# VENV      where the venv is
# E2E_JOBS  end-to-end tests side by side (0: one after another; each already starts 2-4 processes)

PYTHON ?= python3
VENV ?= .venv
E2E_JOBS ?= 0

BIN := $(VENV)/bin
READY := $(VENV)/.ready
CONSTRAINTS := tests/constraints.txt

.DELETE_ON_ERROR:
.PHONY: drill test lint bench corpus clean

# Whatever the verdicts are, say where the evidence is; the exit code stays that of the run.
drill: $(READY)
	@status=0; $(BIN)/ckptdrill run matrices/quickstart.yaml || status=$$?; \
	[ ! -e runs/quickstart/latest ] || echo "packet: $$(readlink -f runs/quickstart/latest)/index.html"; \
	exit $$status

test: lint
	$(BIN)/python -m pytest -q
	$(BIN)/python -m pytest -q -m 'e2e or corpus or slow' -n $(E2E_JOBS) --durations 10

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

# Real resume mistakes and healthy jobs, each a small script: what is caught, missed, wrongly accused.
corpus: $(READY)
	@$(BIN)/python tests/corpus/run.py

# Everything that can be made again; run folders are evidence and stay.
clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find ckptdrill drills tests -name __pycache__ -type d -prune -exec rm -rf {} +
