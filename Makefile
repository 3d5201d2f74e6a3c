# Two commands for a newcomer: `make demo` and `make test`. Each sets up what it needs, once.
PYTHON ?= python3
VENV ?= .venv
VISION_VENV ?= .venv-vision
INTEGRATIONS_VENV ?= .venv-integrations
OPACUS_PACKAGES = $(VENV)/opacus-tests
VISION_PACKAGES = $(INTEGRATIONS_VENV)/vision
WORKERS ?= 2
PYTEST_ENV = OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# A worker keeps its own half of the files, with what their fixtures made, and takes from the other one at the end.
PARALLEL = -n $(WORKERS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help demo test test-long test-all bench reproduce reproduce-gpu lint test-vision test-opacus test-integrations models docs wheel format clean

help:
	@echo "make demo         train privately on handwritten digits and write the leakage report"
	@echo "make test         lint, type check, tests and doctests"
	@echo "make test-all     the same with the tests that take minutes each (make test-long: those alone)"
	@echo "make bench        what the accounting costs on this machine (BENCH=--quick: in minutes)"
	@echo "make reproduce    the papers' tables and figures, measured here: within an hour on two cores (docs/reproduction.md)"
	@echo "make reproduce-gpu  those that need a GPU"
	@echo "make test-vision  the second test leg: torch 2.10 with torchvision 0.25 (CPU wheels exist on aarch64)"
	@echo "make test-opacus  Opacus's own tests with torchfil's engine, a part in under 3 minutes (OPACUS=--all: all)"
	@echo "make test-integrations  the tests that need Lightning, Hugging Face and timm (0.2 GB more to install); docs/models.md"
	@echo "make models       write docs/models.md: the models people train, each compared with brute force"
	@echo "make docs         the guide and the API reference, as HTML in build/docs"
	@echo "make wheel        sdist and wheel in dist/, the wheel tried in an empty environment (needs the build package)"
	@echo "make format       let ruff format and fix the code"
	@echo "make clean        remove the virtual environments and caches"

$(VENV)/.installed: setup.cfg setup.py pyproject.toml constraints.txt
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(VISION_VENV)/.installed: setup.cfg setup.py pyproject.toml constraints-vision.txt
	@test -x $(VISION_VENV)/bin/python || $(PYTHON) -m venv $(VISION_VENV)
	$(VISION_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VISION_VENV)/bin/python -m pip install --quiet --constraint constraints-vision.txt --editable '.[dev,vision]'
	@touch $@

$(INTEGRATIONS_VENV)/.installed: setup.cfg setup.py pyproject.toml constraints.txt
	@test -x $(INTEGRATIONS_VENV)/bin/python || $(PYTHON) -m venv $(INTEGRATIONS_VENV)
	$(INTEGRATIONS_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(INTEGRATIONS_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,lightning,huggingface,peft]'
	@touch $@

# Without what they depend on, as Opacus's; outside of the environment, where transformers would import torchvision.
$(VISION_PACKAGES)/.installed: $(INTEGRATIONS_VENV)/.installed
	$(INTEGRATIONS_VENV)/bin/python -m pip install --quiet --upgrade --no-deps --constraint constraints.txt --target $(VISION_PACKAGES) \
		torchvision timm
	@touch $@

# Beside the environment, not in it, and without what they depend on: torchvision would pull CUDA packages on x86_64.
$(OPACUS_PACKAGES)/.installed: $(VENV)/.installed
	$(VENV)/bin/python -m pip install --quiet --upgrade --no-deps --constraint constraints.txt --target $(OPACUS_PACKAGES) \
		torchvision parameterized
	@touch $@

$(VENV)/.docs-installed: $(VENV)/.installed
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $@

demo: $(VENV)/.installed
	$(VENV)/bin/python -m torchfil demo

test: lint
	$(PYTEST_ENV) $(VENV)/bin/python -m pytest $(PARALLEL)

test-all: lint
	TORCHFIL_LONG=1 $(PYTEST_ENV) $(VENV)/bin/python -m pytest $(PARALLEL)

test-long: $(VENV)/.installed
	TORCHFIL_LONG=1 $(PYTEST_ENV) $(VENV)/bin/python -m pytest $(PARALLEL) -m long

bench: $(VENV)/.installed
	$(VENV)/bin/python -m benchmarks $(BENCH)

# Both go on where they ended. REPRODUCE="--only guo-figure2 --again": one row, again.
reproduce: $(VENV)/.installed
	$(VENV)/bin/python -m benchmarks.reproduce $(REPRODUCE)

reproduce-gpu: $(VENV)/.installed
	$(VENV)/bin/python -m benchmarks.reproduce --gpu $(REPRODUCE)

lint: $(VENV)/.installed
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .
	$(VENV)/bin/python -m mypy

test-vision: $(VISION_VENV)/.installed
	$(PYTEST_ENV) $(VISION_VENV)/bin/python -m pytest $(PARALLEL) -m "vision or torch_versions"

test-opacus: $(OPACUS_PACKAGES)/.installed
	$(PYTEST_ENV) PYTHONPATH=$(OPACUS_PACKAGES) $(VENV)/bin/python -m tests.opacus_suite $(OPACUS)

test-integrations: $(VISION_PACKAGES)/.installed
	$(PYTEST_ENV) $(INTEGRATIONS_VENV)/bin/python -m pytest $(PARALLEL) tests/integrations tests/test_readme.py

models: $(VISION_PACKAGES)/.installed
	$(PYTEST_ENV) $(INTEGRATIONS_VENV)/bin/python -m tests.integrations.model_zoo --workers $(WORKERS) $(MODELS)

docs: $(VENV)/.docs-installed
	$(VENV)/bin/python -m sphinx --fail-on-warning --keep-going --quiet -b html docs build/docs
	@echo "build/docs/index.html"

# The wheel alone, in an environment and a folder of its own: what a newcomer has after `pip install torchfil`.
wheel: $(VENV)/.installed
	rm -rf dist build/empty build/lib build/bdist*
	$(VENV)/bin/python -m pip install --quiet build
	$(VENV)/bin/python -m build --outdir dist .
	$(PYTHON) -m venv build/empty
	build/empty/bin/python -m pip install --quiet --constraint constraints.txt dist/*.whl
	cd build/empty && bin/torchfil --version && bin/torchfil demo --epochs 1 -o demo

format: $(VENV)/.installed
	$(VENV)/bin/python -m ruff format .
	$(VENV)/bin/python -m ruff check --fix .

clean:
	rm -rf $(VENV) $(VISION_VENV) $(INTEGRATIONS_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
