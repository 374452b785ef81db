# Two commands on a fresh machine: `make demo` and `make test`. Each sets up .venv by itself, once.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
NAME   ?= census

.PHONY: help demo test check format bench gpu-test docs clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml constraints.txt setup.py src/ampwise/census/_native.c
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "make: ampwise needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@mkdir -p $(VENV) 2>/dev/null && touch $(VENV)/.writable 2>/dev/null || { \
	  echo "make: cannot write to $(VENV) here; give a folder you own: make VENV=/path/to/venv $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "setting up $(VENV) (once; about a minute)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(STAMP)

demo: $(STAMP) ## train a small GPT under FP16 autocast and show what each layer would lose
	@$(BIN)/python examples/char_gpt.py

test: $(STAMP) ## all tests
	@$(BIN)/python -m pytest -n 2

check: $(STAMP) ## formatter, linter, types, generated docs, tests
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python tools/generate_docs.py --check
	@$(BIN)/python -m pytest -n 2

format: $(STAMP) ## rewrite the source in the house format
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

docs: $(STAMP) ## write the generated pages again
	@$(BIN)/python tools/generate_docs.py

bench: $(STAMP) ## run one benchmark: make bench NAME=census
	@$(BIN)/python -m benchmarks.$(NAME)

gpu-test: ## the tests that need CUDA, in the Python you have (torch, triton, pytest, hypothesis; no .venv)
	@PYTHONPATH=src $(PYTHON) -m pytest -m gpu -p no:cacheprovider tests

clean: ## remove what was built
	@rm -rf $(VENV) build src/*.egg-info src/ampwise/census/*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis
