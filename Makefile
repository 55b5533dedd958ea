# Everything a person does with a checkout; `make` alone lists it. Needs Python 3.11 and make, no root.
#
# The environment is .venv, built once from requirements.lock. Two stamps inside it say what it holds: one named after
# the lock's hash, one after pyproject.toml's, so a second run of any target installs nothing.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:
.PHONY: help up test test-models test-kernels test-gpu check manifests-check format bench lock install clean
MAKEFLAGS += --no-print-directory --no-builtin-rules

UV_VERSION := 0.13.9
TORCH_VERSION := 2.13.0
BIN := .venv/bin
SHARED := fastapi|httpx|numpy|pydantic|pydantic-settings|redis|starlette|tokenizers|transformers|uvicorn
hash = $(shell sha256sum $(1) 2>/dev/null | cut -c1-16)
LOCKED := .venv/locked-$(call hash,requirements.lock)
INSTALLED := .venv/installed-$(call hash,pyproject.toml)
# Beside the environment, not in it: vLLM for CPUs warns of a Triton that it finds, at every start.
KERNELS := .venv/kernels-$(shell sed -n 's/^kernels = \["triton==\(.*\)"\]/\1/p' pyproject.toml)
# Our own environment has torch for CPUs. What tests for a GPU import: torch, triton, hypothesis, pytest and its plugins.
PYTHON := $(BIN)/python

# uv reads no pip configuration: hand it the folders of wheels that pip knows of, if any. It takes the environment to
# install into from us, whatever other one the caller has activated.
links = $$(echo $${PIP_FIND_LINKS:-$$($(BIN)/pip config get global.find-links 2>/dev/null)} | tr ' ' ',')
UV_INSTALL := $(BIN)/uv pip install --python $(BIN)/python --no-deps

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | column -t -s '|'

up: $(INSTALLED) ## set everything up (once) and serve on 127.0.0.1:8000 until Ctrl-C
	@$(BIN)/memshard serve $(ARGS)

test: $(INSTALLED) ## run the tests (ARGS="-k word" chooses)
	@$(BIN)/memshard prepare
	@$(BIN)/python -m pytest -m "not gpu and not all_models" $(ARGS)

test-models: $(INSTALLED) ## prove every architecture of the README's table (10 minutes)
	@$(BIN)/memshard prepare
	@$(BIN)/python -m pytest -m "not gpu" tests/connector/test_engine_architectures.py \
	  tests/connector/test_engine_tiers.py tests/deployments/test_engines_move.py $(ARGS)

test-kernels: $(INSTALLED) $(KERNELS) ## test the GPU kernels' logic on a CPU, with Triton's interpreter
	@PYTHONPATH=$(KERNELS) $(BIN)/python -m pytest tests/connector/test_compose_fused.py $(ARGS)

test-gpu: $(if $(filter $(BIN)/%,$(PYTHON)),$(INSTALLED)) ## run the tests that need a CUDA device (PYTHON=the one with CUDA's torch)
	@$(PYTHON) -m pytest -m gpu $$(grep -rl --include='*.py' 'mark\.gpu' tests) $(ARGS)

check: $(INSTALLED) ## check format, lint, types and import layers
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

manifests-check: $(INSTALLED) ## build every Kubernetes overlay and check it (needs kubectl)
	@$(BIN)/python -W ignore -m k8s.check $(ARGS)

format: $(INSTALLED) ## format the code and fix what lint can fix
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(INSTALLED) ## run every benchmark short and write bench.html (ARGS=--full for hours of it)
	@$(BIN)/memshard bench all $(ARGS)

lock: $(BIN)/uv ## resolve pyproject.toml into requirements.lock (ARGS=--upgrade for newer versions)
	@echo "==> Resolving requirements.lock"
	@links=$(links); if [[ -n $$links ]]; then export UV_FIND_LINKS=$$links; else export UV_TORCH_BACKEND=cpu; fi; \
	$(BIN)/uv pip compile --quiet pyproject.toml --group dev --group bench --overrides requirements.overrides \
	  --python-version 3.11 --custom-compile-command "make lock" --output-file requirements.lock $(ARGS)
	@echo "==> Resolving k8s/images/cuda.lock"
	@$(BIN)/uv pip compile --quiet pyproject.toml k8s/images/cuda.in --overrides k8s/images/cuda.overrides \
	  --constraints <(grep -E '^($(SHARED))==' requirements.lock) --python-version 3.11 \
	  --custom-compile-command "make lock" --output-file k8s/images/cuda.lock

install: $(INSTALLED) ## build the environment only

clean: ## delete the environment and every cache in the checkout
	@rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

$(BIN)/uv:
	@for python in python3.11 python3; do \
	  if $$python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [[ -z $${found:-} ]]; then echo "Python 3.11 is needed, and neither python3.11 nor python3 is one" >&2; exit 1; fi; \
	echo "==> Creating .venv with $$found"; \
	$$found -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)

# Compiled at once, because every start of the cluster imports vLLM and Ray in a dozen processes: 15 s of two cores.
# vLLM's CPU build needs the CPU build of torch, which PyPI does not carry: from pip's folder of wheels where there is
# one, else from the index that uv knows.
$(LOCKED): $(BIN)/uv
	@echo "==> Installing torch $(TORCH_VERSION) for CPUs"
	@$(BIN)/pip install --quiet --no-index --no-deps torch==$(TORCH_VERSION) 2>/dev/null \
	  || $(UV_INSTALL) --torch-backend=cpu torch==$(TORCH_VERSION)
	@version=$$($(BIN)/python -c 'from importlib.metadata import version; print(version("torch"))'); \
	if [[ $$version != $(TORCH_VERSION)+cpu ]]; then \
	  echo "torch is $$version, and $(TORCH_VERSION)+cpu is needed; run make clean and try again" >&2; exit 1; fi
	@echo "==> Installing the packages of requirements.lock (2 GB) and compiling them"
	@links=$(links); export $${links:+UV_FIND_LINKS=$$links}; $(UV_INSTALL) --compile-bytecode -r requirements.lock
	@rm -f .venv/locked-* && touch $@

$(KERNELS): $(BIN)/uv
	@echo "==> Installing Triton for its interpreter (700 MB)"
	@rm -rf .venv/kernels-*
	@links=$(links); export $${links:+UV_FIND_LINKS=$$links}; \
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --group kernels --target $@.part
	@mv $@.part $@

$(INSTALLED): $(LOCKED)
	@echo "==> Installing memshard from this checkout"
	@$(UV_INSTALL) --quiet --no-build-isolation -e .
	@rm -f .venv/installed-* && touch $@
