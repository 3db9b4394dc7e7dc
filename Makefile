# `make run` and `make test` are all that is needed; `make study` compares the conditions. Each makes .venv first if it is missing or out of date.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

MAWPS  := ../shared/data/mawps_test.jsonl
SEEDS  ?= 1,2,3

.PHONY: run setup test lint bench study clean

run: setup  ## the quickstart: the alternation on the embedded model
	@$(BIN)/whale-tui run sample_configs/quickstart.toml

setup: $(STAMP)  ## the environment alone

$(STAMP): pyproject.toml constraints.txt
	@echo "==> making the environment in $(VENV) (a few minutes the first time)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "whale-tui needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)
	@echo "==> the environment is ready"

test: setup  ## every test that needs no GPU
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	$(BIN)/python -m benchmarks

study: setup  ## every condition at equal budgets, with a report; the same command goes on after a stop
	$(BIN)/whale-tui compare sample_configs/study.toml --seeds $(SEEDS) --out study/encyclopedia
	@if [ -f $(MAWPS) ]; then \
	  $(BIN)/whale-tui compare sample_configs/maths-small.toml --seeds $(SEEDS) --budget 4000 \
	    --set domain.options.train="$(abspath $(MAWPS))" --out study/mawps; \
	else echo "==> $(MAWPS) is not here: the study of word problems is left out"; fi

clean:
	rm -rf $(VENV)
