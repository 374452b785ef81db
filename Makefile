# On a fresh machine: `make demo` and `make test`. `make demo` installs torch and ampwise, the others what tests need, too.
PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
NAME   ?= census
GROUP  ?= order
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# The demo has an environment of its own, unless the one for development is there already.
DEMO   := $(if $(wildcard $(STAMP)),$(VENV),build/demo-env)
# Linux on x86-64: from torch's own index comes a build without CUDA, a tenth of the size. Elsewhere PyPI's has none.
TORCH_INDEX ?= $(if $(filter Linux-x86_64,$(shell uname -s)-$(shell uname -m)),https://download.pytorch.org/whl/cpu)
# Bytecode is written once, not compiled anew in each of the many processes that tests start.
unexport PYTHONDONTWRITEBYTECODE
NEEDS  := pyproject.toml constraints.txt setup.py src/ampwise/numbers/census/_native.c

.PHONY: help demo layers test nightly fuzz attack check lint types docs docs-check site format new-rule peers bench gpu-test gpu-bench release clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(DEMO)/.installed ## watch a training script that has four mistakes (half a minute; its first time installs torch)
	@mkdir -p build
	@$(DEMO)/bin/ampwise run --force --output build/demo examples/broken_gpt.py --checkpoint build/checkpoint.pt $(ARGS)
	@$(DEMO)/bin/ampwise report --output build/demo.html build/demo >/dev/null
	@printf '\nWhere to look next\n'
	@printf '  this run as a page      build/demo.html\n'
	@printf '  without running it      $(DEMO)/bin/ampwise check examples/broken_gpt.py    (--diff shows the fix, --fix applies it)\n'
	@printf '  a broken script, fixed  docs/start.md, five minutes\n'

layers: $(STAMP) ## train a small GPT in FP16 and show what each layer would lose in other formats
	@$(BIN)/python examples/char_gpt.py $(ARGS)

test: $(STAMP) ## the tests, with fewer variants of each than `make nightly`
	@$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

nightly: $(STAMP) ## all tests at full length: more examples, more steps, all attacks, each program in its own Python
	@AMPWISE_NIGHTLY=1 AMPWISE_COLD=1 AMPWISE_FUZZ=10000 AMPWISE_ATTACK=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

fuzz: $(STAMP) ## 10,000 mangled scripts through `ampwise check` (slow; `make test` has 80)
	@AMPWISE_FUZZ=10000 $(BIN)/python -m pytest -n 2 tests/check/test_fuzz.py $(ARGS)

attack: $(STAMP) ## hostile files, names, scripts, kills and call orders, at most 10 minutes (`make test` has a few of each)
	@AMPWISE_ATTACK=1 timeout 600 $(BIN)/python -m pytest -n 2 --dist worksteal tests/attack $(ARGS)

check: lint ## formatter, linter, our own linter, strict types, generated docs current, the site, tests
	@$(MAKE) --no-print-directory -j3 --output-sync=target test docs-check-beside types-beside site-beside

# Tests sometimes wait for a browser or a clock: these jobs use that time, at a lower priority.
%-beside: $(STAMP)
	@nice -n 5 $(MAKE) --no-print-directory $*

lint: $(STAMP)
	@$(BIN)/ruff format --check --quiet . || { echo "make: not formatted; run: make format" >&2; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ampwise check --select ALL --output-format concise .

types: $(STAMP)
	@$(BIN)/mypy

docs-check: $(STAMP)
	@$(BIN)/python -m tools.generate_docs --check

docs: $(STAMP) ## write the generated pages
	@$(BIN)/python -m tools.generate_docs

site: $(STAMP) ## build the documentation site in build/site, including the lesson; warnings are errors
	@$(BIN)/python -m sphinx -b html -q -W --keep-going -j 2 -d build/site-parts docs build/site
	@$(BIN)/python -m tools.site.check build/site

format: $(STAMP) ## format the source
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --fix .

new-rule: $(STAMP) ## write the files of a new rule: make new-rule NAME=clip-by-value GROUP=order
	@$(BIN)/python -m tools.new_rule $(NAME) --group $(GROUP)

peers: $(STAMP) ## run the conformance cases with other software and record the outcomes (then `make docs`)
	@$(BIN)/python tools/observe_peers.py

bench: $(STAMP) ## run one benchmark: make bench NAME=census
	@test -f benchmarks/$(NAME).py -o -f benchmarks/$(NAME)/__main__.py || { echo "make: no benchmark '$(NAME)'; there are: $$(cd benchmarks && { grep -l __main__ *.py | sed 's/\.py//'; ls */__main__.py | xargs -n1 dirname; } | xargs)" >&2; exit 1; }
	@$(BIN)/python -m benchmarks.$(NAME) $(ARGS)

gpu-test: ## the tests that need CUDA, in the Python you have (torch, triton, pytest, hypothesis; no .venv), in parallel with pytest-xdist
	@started=; nvidia-cuda-mps-control -d 2>/dev/null && started=yes; \
	AMPWISE_NIGHTLY=1 OMP_NUM_THREADS=1 PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m pytest -m gpu -p no:cacheprovider -p no:benchmark \
	  $(shell $(PYTHON) -c 'import xdist' 2>/dev/null && echo --numprocesses auto --maxprocesses 12 --dist worksteal) \
	  $(shell grep -rlE 'mark\.gpu' tests --include='test_*.py') $(ARGS); code=$$?; \
	test -z "$$started" || echo quit | nvidia-cuda-mps-control; exit $$code

gpu-bench: ## the benchmarks on a GPU, in the Python you have
	@PYTHONPATH=src:.$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m benchmarks.$(NAME) $(ARGS)

release: $(STAMP) ## build wheel and sdist in build/dist, install and test them
	@rm -rf build/dist && mkdir -p build/dist
	@$(BIN)/python -m build --no-isolation --outdir build/dist . >build/release.log 2>&1 || { cat build/release.log >&2; exit 1; }
	@AMPWISE_NIGHTLY=1 AMPWISE_DIST=build/dist $(BIN)/python -m pytest -n 0 tests/release tests/test_api.py $(ARGS)
	@ls build/dist

$(STAMP) build/demo-env/.installed: $(NEEDS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "make: ampwise needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1 | head -1). Choose one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@{ mkdir -p $(@D) && touch $(@D)/.writable; } 2>/dev/null || { \
	  echo "make: cannot write to $(@D). Choose a writable folder: make VENV=/path/to/venv $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "setting up $(@D), once: $(if $(filter $(STAMP),$@),two minutes,under a minute)"
	@$(PYTHON) -m venv $(@D)
	@$(if $(filter $(STAMP),$@),$(INSTALL_DEV),$(INSTALL_DEMO))
	@touch $@

PIP = $(@D)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# A newer pip resolves in half the time; the one that came with Python works, too. Bytecode is compiled on all cores;
# some packages have files for other Python versions, which do not compile.
define INSTALL_DEV
{ $(PIP) --upgrade pip || true; } && $(PIP) --no-compile --editable '.[dev]' && { $(@D)/bin/python -W ignore -m compileall -qq -j 0 src $(@D)/lib || true; }
endef
define INSTALL_DEMO
{ test -z "$(TORCH_INDEX)" || $(PIP) --no-compile --retries 0 --timeout 5 --index-url "$(TORCH_INDEX)" torch 2>/dev/null || true; } && $(PIP) --no-compile --editable '.[torch]'
endef

clean: ## remove build products
	@rm -rf $(VENV) build src/*.egg-info src/ampwise/numbers/census/*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis
