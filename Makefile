# `make help` lists the targets. All of them use the environment in .venv, made once and reused until
# pyproject.toml or constraints.txt changes.

PYTHON ?= python3
ENVIRONMENT := .venv
READY := $(ENVIRONMENT)/.ready
RUN := $(ENVIRONMENT)/bin/python

.DEFAULT_GOAL := help
.PHONY: help setup demo test coverage check browser bench soak compat docs clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## Make the development environment in .venv

$(READY): pyproject.toml constraints.txt scripts/setup.sh scripts/torchvision_import.py
	bash scripts/setup.sh $(PYTHON) $(ENVIRONMENT)

demo: $(READY) ## A script that runs out of memory, why, and a run that finishes; pages go to out/
	$(RUN) examples/demo/demo.py

# Tests run real kills, forks and memory limits beside each other on whatever machine this is: one that fails is run
# once more, and the summary counts it. Three share two processors: a third of the time is spent waiting for children.
WORKERS ?= 3
SUITE := $(RUN) -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder --reruns 1
TEST := $(SUITE) -m "not slow"
SOAK := $(SUITE) --hypothesis-profile=soak

test: check browser ## Everything a change must pass: lint, types, documentation, tests
	$(TEST) --part xla
	$(TEST) --part others

coverage: $(READY) browser ## The same tests with the lines that they run counted, half as long again
	$(TEST) --part xla --cov=memfit --cov-report= --cov-fail-under=0
	$(TEST) --part others --cov=memfit --cov-append

check: $(READY) ## Lint, format and types only
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy --strict src

browser: # A browser for the page tests, where one can be had
	@bash scripts/browser.sh

bench: $(READY) ## Run every benchmark script
	$(RUN) -m benchmarks.run_all

soak: $(READY) browser ## What `make test` leaves out: slow tests, and generated examples by the thousand
	$(SOAK) -m "slow or hypothesis" --part xla
	$(SOAK) -m "slow or hypothesis" --part others

docs: $(READY) ## Build the documentation site into site/, warnings are errors
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

compat: ## The contract suite with the oldest and the newest supported frameworks (downloads gigabytes)
	bash scripts/compat.sh $(PYTHON) .compat

clean: ## Remove what the other targets wrote, except the environment
	rm -rf out site build dist .coverage .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
