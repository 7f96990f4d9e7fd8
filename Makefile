# Needs Python 3.11 or newer and nothing else; everything is installed into .venv.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/installed
PROMPT ?= The licensor grants you
PEER   := PYTHONPATH=tests $(BIN)/python -m support.peer
NODE   := PYTHONPATH=tests $(BIN)/python -m cluster.node
IMAGES := PYTHONPATH=tests $(BIN)/python -m cluster.images
CHART  := PYTHONPATH=tests $(BIN)/python -m support.chart
BASE   ?=
GROUPS ?=
N      ?= 100000
SEED   ?= 1
FIRST  ?= 0
PROTOCOL ?= 8.0
ALSO   ?= 3.6

.DEFAULT_GOAL := help
.PHONY: help install demo check test e2e images manifests conformance interop-old fuzz bench-cpu bench-operator size \
	lock clean

help: ## What can be made
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## Create .venv with the drover command and all that a developer needs

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "drover needs Python 3.11 or newer: make PYTHON=…")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-index --editable .
	@touch $@

demo: $(STAMP) ## One prompt through the demo model on two worker processes
	$(BIN)/drover up manifests/samples/two-workers.yaml --prompt "$(PROMPT)"

check: $(STAMP) ## Lint, formatting, types, layers, architecture
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/test_architecture.py

test: $(STAMP) ## All tests; with stock llama.cpp where it can be installed (root, Debian, network), with helm where Go is
	@$(PEER) install || true
	@$(CHART) helm > /dev/null || true
	$(BIN)/python -m pytest

e2e: $(STAMP) ## Tests on a real Kubernetes: the one KUBECONFIG names, else a node of our own (root, Debian, Go, network)
	@test -n "$$KUBECONFIG" || { $(NODE) build && $(IMAGES) archives; }
	$(BIN)/python -m pytest -m cluster tests/cluster

images: $(STAMP) ## drover-worker and drover-operator, with docker, podman or buildah; BASE=… for another base, BASE=debian makes it
	$(IMAGES) build $(BASE)

manifests: $(STAMP) ## Write the CRD (manifests/ and the chart's) from the spec, manifests/operator.yaml from the chart
	$(CHART) manifests

conformance: $(STAMP) ## llama.cpp's own tests of operations and architectures, through a worker
	$(PEER) install
	PYTHONPATH=tests $(BIN)/python tests/conformance.py

interop-old: $(STAMP) ## llama.cpp clients of older protocols on a worker; they are built first, which takes very long
	$(PEER) install
	PYTHONPATH=tests $(BIN)/python tests/interop_old.py

fuzz: $(STAMP) ## N frames, right and wrong ones, at a worker; SEED, FIRST, PROTOCOL, ALSO: see tests/fuzz.py
	PYTHONPATH=tests $(BIN)/python tests/fuzz.py --n $(N) --seed $(SEED) --first $(FIRST) --protocol $(PROTOCOL) --also "$(ALSO)"

bench-cpu: $(STAMP) ## Speed beside the stock worker and llama.cpp alone; GROUPS=main takes 20 minutes, all of them hours
	$(PEER) install
	PYTHONPATH=tests $(BIN)/python tests/bench_cpu.py $(GROUPS)

bench-operator: $(STAMP) ## The operator and 1,000 InferenceClusters on an API server alone (root, Debian, Go, network)
	PYTHONPATH=tests $(BIN)/python tests/bench_operator.py

size: ## Lines of code in each folder
	@find operator worker tests -name '*.py' -not -path '*/__pycache__/*' | xargs wc -l | \
	awk '$$2 != "total" { n = split($$2, p, "/"); d = p[1]; for (i = 2; i < n; i++) d = d "/" p[i]; lines[d] += $$1 } \
	     END { for (d in lines) printf "%6d  %s\n", lines[d], d }' | sort -k2

lock: $(STAMP) ## Pin the newest versions that pyproject.toml allows into requirements.lock
	CUSTOM_COMPILE_COMMAND="make lock" $(BIN)/pip-compile --quiet --upgrade --generate-hashes --strip-extras --allow-unsafe \
		--no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
		--extra worker,coordinator,operator,build,test,dev --output-file requirements.lock pyproject.toml

clean: ## Remove what the other targets made
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build
	find operator worker tests -name __pycache__ -prune -exec rm -rf {} +
