# `make example` and `make test` are all a fresh clone needs; both set up `.venv` first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: venv headers example test check format clean

venv: $(STAMP)

$(STAMP): pyproject.toml
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

check: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: venv
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
