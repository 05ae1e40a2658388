# Everything runs in a virtual environment that the targets make themselves.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The CPU build by its exact version: a bare "torch" brings several GB of CUDA libraries on Linux.
TORCH ?= torch==2.13.0
PROCESSES ?= 2

.PHONY: demo test test-slow docs clean

demo: $(READY)
	$(BIN)/focus-hf demo --out demo-output

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n $(PROCESSES)

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) demo-output dist
