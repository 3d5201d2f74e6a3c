# Two commands for a newcomer: `make demo` and `make test`. Each sets up what it needs, once.
PYTHON ?= python3
VENV ?= .venv
VISION_VENV ?= .venv-vision
INTEGRATIONS_VENV ?= .venv-integrations
AUDIT_VENV ?= .venv-audit
OPACUS_PACKAGES = $(VENV)/opacus-tests
VISION_PACKAGES = $(INTEGRATIONS_VENV)/vision
WORKERS ?= 2
PYTEST_ENV = OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# A worker keeps its own half of the files, with what their fixtures made, and takes from the other one at the end.
PARALLEL = -n $(WORKERS) --dist worksteal
SLOWEST ?= 15
PYTEST = $(PYTEST_ENV) $(VENV)/bin/python -m pytest $(PARALLEL) --durations $(SLOWEST)

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-long test-all coverage bench reproduce reproduce-gpu lint static test-vision test-opacus test-integrations test-audit models docs linkcheck wheel format clean

help:
	@echo "make demo         train privately on handwritten digits and write the leakage report"
	@echo "make test         lint, type check, tests and doctests; the slowest are listed (SLOWEST=50: more of them)"
	@echo "make test-slow    the tests that take more than about 5 seconds each (make test-long: more than 20)"
	@echo "make test-all     all three together"
	@echo "make coverage     make test's tests, and which lines of torchfil they run (as HTML in build/coverage)"
	@echo "make bench        what the accounting costs on this machine (BENCH=--quick: in minutes)"
	@echo "make reproduce    the papers' tables and figures, measured here: within an hour on two cores (docs/reproduction.md)"
	@echo "make reproduce-gpu  those that need a GPU"
	@echo "make test-vision  the second test leg: torch 2.10 with torchvision 0.25 (CPU wheels exist on aarch64)"
	@echo "make test-opacus  Opacus's own tests with torchfil's engine, a part in under 3 minutes (OPACUS=--all: all)"
	@echo "make test-integrations  the tests that need Lightning, Hugging Face and timm (0.2 GB more to install); docs/models.md"
	@echo "make test-audit   the same scores given to jax_privacy's auditor, in an environment of its own"
	@echo "make models       write docs/models.md: the models people train, each compared with brute force"
	@echo "make docs         the site in build/docs: guide, tutorials (they are run), reference"
	@echo "make linkcheck    every link inside of the site leads somewhere"
	@echo "make wheel        sdist and wheel in dist/, the wheel tried in an empty environment (needs the build package)"
	@echo "make format       let ruff format and fix the code"
	@echo "make clean        remove the virtual environments and caches"

$(VENV)/.installed: setup.cfg setup.py pyproject.toml constraints.txt
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,test-report]'
	@touch $@

$(VISION_VENV)/.installed: setup.cfg setup.py pyproject.toml constraints-vision.txt
	@test -x $(VISION_VENV)/bin/python || $(PYTHON) -m venv $(VISION_VENV)
	$(VISION_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VISION_VENV)/bin/python -m pip install --quiet --constraint constraints-vision.txt --editable '.[dev,test-report,vision]'
	@touch $@

$(INTEGRATIONS_VENV)/.installed: setup.cfg setup.py pyproject.toml constraints.txt
	@test -x $(INTEGRATIONS_VENV)/bin/python || $(PYTHON) -m venv $(INTEGRATIONS_VENV)
	$(INTEGRATIONS_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(INTEGRATIONS_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,test-report,lightning,huggingface,peft]' \
		'trl; python_version >= "3.11"'
	@touch $@

$(AUDIT_VENV)/.installed: setup.cfg setup.py pyproject.toml constraints.txt
	@test -x $(AUDIT_VENV)/bin/python || $(PYTHON) -m venv $(AUDIT_VENV)
	$(AUDIT_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable . pytest jax-privacy==2.0.0
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

test: static
	$(PYTEST) -m "not slow and not long"

test-slow: $(VENV)/.installed
	$(PYTEST) -m "slow and not long"

test-long: $(VENV)/.installed
	TORCHFIL_LONG=1 $(PYTEST) -m long

test-all: static
	TORCHFIL_LONG=1 $(PYTEST)

coverage: $(VENV)/.installed
	$(PYTEST) -m "not slow and not long" --cov --cov-report=term:skip-covered --cov-report=html

bench: $(VENV)/.installed
	$(VENV)/bin/python -m benchmarks $(BENCH)

# Both go on where they ended. REPRODUCE="--only guo-figure2 --again": one row, again.
reproduce: $(VENV)/.installed
	$(VENV)/bin/python -m reproduction $(REPRODUCE)

reproduce-gpu: $(VENV)/.installed
	$(VENV)/bin/python -m reproduction --gpu $(REPRODUCE)

# the links' tests are among all the tests, too
lint: static
	$(VENV)/bin/python -m pytest -q -p no:cacheprovider tests/test_docs.py -k links

static: $(VENV)/.installed
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .
	$(VENV)/bin/python -m mypy
	git ls-files -z --cached --others --exclude-standard | xargs -0 $(VENV)/bin/python -m codespell_lib

test-vision: $(VISION_VENV)/.installed
	$(PYTEST_ENV) $(VISION_VENV)/bin/python -m pytest $(PARALLEL) -m "vision or torch_versions"

test-opacus: $(OPACUS_PACKAGES)/.installed
	$(PYTEST_ENV) PYTHONPATH=$(OPACUS_PACKAGES) $(VENV)/bin/python -m tests.opacus_suite $(OPACUS)

test-integrations: $(VISION_PACKAGES)/.installed
	$(PYTEST_ENV) $(INTEGRATIONS_VENV)/bin/python -m pytest $(PARALLEL) tests/integrations tests/test_readme.py tests/test_examples.py -k "not test_examples or lightning or huggingface"

test-audit: $(AUDIT_VENV)/.installed
	$(PYTEST_ENV) $(AUDIT_VENV)/bin/python -m pytest tests/audit/test_jax_privacy.py

models: $(VISION_PACKAGES)/.installed
	$(PYTEST_ENV) $(INTEGRATIONS_VENV)/bin/python -m tests.integrations.model_zoo --workers $(WORKERS) $(MODELS)

docs: $(VENV)/.docs-installed
	$(VENV)/bin/python -m sphinx --fail-on-warning --keep-going --quiet -b html docs build/docs
	@echo "build/docs/index.html"

linkcheck: $(VENV)/.docs-installed
	$(VENV)/bin/python -m sphinx --fail-on-warning --keep-going --quiet -d build/docs/.doctrees -b linkcheck docs build/linkcheck

# The wheel alone, in an environment and a folder of its own: what a newcomer has after `pip install torchfil`.
wheel: $(VENV)/.installed
	rm -rf dist build/empty build/lib build/bdist*
	$(VENV)/bin/python -m pip install --quiet build
	$(VENV)/bin/python -m build --outdir dist .
	$(PYTHON) -m venv build/empty
	build/empty/bin/python -m pip install --quiet --constraint constraints.txt dist/*.whl
	cd build/empty && bin/torchfil --version && bin/torchfil demo --epochs 1 -o demo
	build/empty/bin/python -m pip install --quiet --constraint constraints.txt "$$(ls dist/*.whl)[glm,report]"
	cp -r examples docs/tutorials build/empty
	cd build/empty && for each in glm_iwpc plis_regression layer_sensitivity; do \
		TORCHFIL_DATA=none bin/python examples/$$each.py --out out > out-$$each.txt || exit 1; head -n 1 out-$$each.txt; done
	cd build/empty && bin/python tutorials/run.py tutorials/first-report.md --set EPOCHS=2 > /dev/null
	@echo "the wheel works: demo, three examples and a tutorial"

format: $(VENV)/.installed
	$(VENV)/bin/python -m ruff format .
	$(VENV)/bin/python -m ruff check --fix .

clean:
	rm -rf $(VENV) $(VISION_VENV) $(INTEGRATIONS_VENV) $(AUDIT_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .coverage*
