# One environment for everything but te-conformance. Verbs: make help.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DATA := data/stdlib

.DEFAULT_GOAL := help
.PHONY: help quickstart setup check test e2e docs te-conformance bench clean

help:
	@echo "make quickstart   train a small LLaMA on 2 x 2 processes under GNMR control (a few minutes)"
	@echo "make test         set up and run every test"
	@echo "make check        lint, types and import contracts"
	@echo "make e2e          the slow part of the tests alone"
	@echo "make docs         build the documentation into site/; warnings are errors"
	@echo "make te-conformance  build Transformer Engine without a GPU (20 minutes, 8 GB) and test against it"
	@echo "make bench        what control costs a step"
	@echo "make setup        only create .venv and install"
	@echo "make clean        remove .venv, site and tool caches (never data or runs)"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gnmr_megatron needs Python 3.11 or newer; try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

# product only: what the quickstart needs
$(VENV)/.product: setup.py constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e .
	@touch $@

# product, tests and tools
$(VENV)/.development: setup.py constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(VENV)/.product $@

$(VENV)/.documentation: setup.py constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $(VENV)/.product $@

setup: $(VENV)/.development

quickstart: $(VENV)/.product
	@$(BIN)/gnmr-megatron prepare-data stdlib: --output $(DATA) --vocab-size 2048
	@$(BIN)/gnmr-megatron train --config configs/runs/quickstart.yaml
	@echo "first      source $(BIN)/activate"

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: setup
	$(BIN)/python -m pytest

e2e: setup
	$(BIN)/python -m pytest tests/distributed tests/end_to_end

docs: $(VENV)/.documentation
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict -f docs/generator/mkdocs.yml
	@echo "open site/index.html; with search: $(BIN)/python -m http.server -d site"

te-conformance:
	PYTHON=$(PYTHON) tools/te_environment.sh .venv-te
	.venv-te/bin/python -m pytest tests/conformance -v -W ignore

bench: setup
	$(BIN)/python tools/simulate_scale.py
	$(BIN)/python tools/benchmark_control.py
	$(BIN)/python tools/benchmark_precision.py kernels
	$(BIN)/python tools/benchmark_precision.py memory
	$(BIN)/python tools/benchmark_precision.py step

clean:
	rm -rf $(VENV) .venv-te site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache *.egg-info
