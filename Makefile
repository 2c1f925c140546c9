# Everything a developer or CI needs. `make help` lists the targets.
SHELL       := /bin/bash
PYTHON      ?= python3
VENV        := .venv
BIN         := $(VENV)/bin
CACHE_DIR   ?= $(or $(ETJ_CACHE_DIR),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/elastic-training-operator)
UV_VERSION  := $(shell sed -n 's/^uv==\([^ ]*\).*/\1/p' release/installer-requirements.txt)
UV          := $(CACHE_DIR)/uv-$(UV_VERSION)/bin/uv
export ETJ_CACHE_DIR := $(CACHE_DIR)
# torch compiles DeepSpeed's CPU communication op at its first start (about a minute): keep it outside the checkout.
export TORCH_EXTENSIONS_DIR ?= $(CACHE_DIR)/torch_extensions
# What mypy knows of torch and its like serves every checkout.
export MYPY_CACHE_DIR ?= $(CACHE_DIR)/mypy
export DS_ACCELERATOR := cpu
export OMP_NUM_THREADS ?= 1

# Hashes of the files for every platform: of wheels for arm64, too, on a machine that is none.
PINNED := --generate-hashes --no-emit-index-url --no-annotate --no-header --python-version 3.11

.PHONY: help setup comm-op lint test other-tiers test-touched test-all test-fast test-files test-engine test-cluster test-servers test-nodes test-e2e test-gpu demo demo-lifecycle bench simulate format lock clean testbed-up testbed-down generate docs lock-images images images-load release check-tag notes publish plugin canary

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-14s %s\n", $$1, $$2}'

setup: $(VENV)/.done ## make .venv with everything (torch and DeepSpeed included; about 3 minutes the first time)

$(UV):
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v >= (3, 11) else f"Python 3.11 or newer is needed, found {v[0]}.{v[1]}: set PYTHON=/path/to/python3.11")'
	@echo "setup: installing the package installer (once per machine)"
	@rm -rf $(CACHE_DIR)/uv-$(UV_VERSION) && $(PYTHON) -m venv $(CACHE_DIR)/uv-$(UV_VERSION)
	@$(CACHE_DIR)/uv-$(UV_VERSION)/bin/pip install -q --require-hashes -r release/installer-requirements.txt

$(VENV)/.done: pyproject.toml requirements.lock | $(UV)
	@echo "setup: creating .venv (torch and DeepSpeed are large: minutes the first time, seconds from the cache)"
	@$(UV) venv -q --allow-existing --python "$$($(PYTHON) -c 'import sys; print(sys.executable)')" $(VENV)
	@DS_BUILD_OPS=0 VIRTUAL_ENV=$(VENV) $(UV) pip install --link-mode hardlink --compile-bytecode --require-hashes -r requirements.lock
	@VIRTUAL_ENV=$(VENV) $(UV) pip install -q --no-deps -e .
	@touch $@

# Everybody else waits for whoever compiles them, for minutes if that one is held up: so nobody compiles them beside others.
comm-op: setup
	-@$(BIN)/python -m testbed extensions

lock: | $(UV) ## resolve the dependencies again and pin them, with the hashes of all their files, in requirements.lock
	$(UV) pip compile -q --all-extras $(PINNED) --upgrade pyproject.toml -o requirements.lock
	echo hatchling | $(UV) pip compile -q $(PINNED) --upgrade - -o release/build-requirements.txt
	@$(MAKE) --no-print-directory lock-images

lock-images: | $(UV) ## write what each image needs of requirements.lock to images/*/requirements.txt
	images/lock.sh $(UV)

release: setup | $(UV) ## wheel, sdist, chart, plugin, SBOM and checksums of the last commit in dist/, made twice and compared (BASE_URL=...)
	$(BIN)/python -m release --uv $(UV) --pip $(dir $(UV))pip $(if $(BASE_URL),--base-url $(BASE_URL)) $(RELEASE_ARGS)

check-tag:
	@version=$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml); [ "$(TAG)" = "v$$version" ] \
	    || { echo "release: expected the tag v$$version, as in pyproject.toml, found $(TAG)" >&2; exit 1; }

notes: ## print what CHANGELOG.md says about a version (TAG=v1.2.3)
	@$(PYTHON) -m release.changelog $(patsubst v%,%,$(TAG))

publish: ## push images and chart of dist/ to REGISTRY=... with skopeo and helm
	@release/publish.sh dist

images: ## build the container images with docker, podman or buildah (IMAGES="operator reshard", REGISTRY=...)
	@images/build.sh $(IMAGES)

images-load: setup ## build the images without any of them, and bring them onto the nodes of the test bed
	$(BIN)/python -m testbed images --load

plugin: setup | $(UV) ## build kubectl-etj as one file for each platform, with a manifest for krew, in dist/
	$(BIN)/python -m krew.build --pip $(dir $(UV))pip

lint: setup ## ruff, mypy --strict, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

generate: setup ## write the CRD, its copy in the chart and the reference pages from the models and parsers
	$(BIN)/python -m crds.generate
	$(BIN)/python -m docs.cli_reference

docs: setup ## build the documentation site into site/VERSION (SITE=another folder)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict --site-dir $(abspath $(or $(SITE),site))
	@echo "docs: open $(or $(SITE),site)/index.html, or serve that folder with any web server"

format: setup ## let ruff format and fix what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test-fast: setup ## unit, property and golden tests but the slowest, on all processors: under a minute
	$(BIN)/pytest -n auto -m 'not slow' tests/unit tests/property tests/golden

SYNC := $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)

# The cluster tier mostly waits, and has clocks: it runs from the first minute to the last, and all others take what it leaves.
test: setup ## lint and every tier: the cluster tier's nodes beside the unit, property, golden and engine tiers and the API servers
	@[ "$$ETJ_TEST_KUBECONFIG" ] || $(BIN)/python -m testbed fetch || [ $$? = 3 ]  # builds beside tests would starve them
	@$(MAKE) --no-print-directory -k -j3 $(SYNC) lint test-nodes other-tiers

other-tiers:
	@$(MAKE) --no-print-directory -k -j1 test-files test-engine test-servers

test-files: setup
	nice -n 10 $(BIN)/pytest -n auto tests/unit tests/property tests/golden

test-engine: comm-op ## the tier with torch and DeepSpeed
	nice -n 10 $(BIN)/pytest tests/engine

test-cluster: test-nodes ## the tier on a real cluster
	$(BIN)/pytest tests/cluster -m own_api_server

test-servers: setup
	@$(BIN)/python -m testbed fetch || [ $$? = 3 ]
	$(BIN)/pytest tests/cluster -m own_api_server

test-nodes: comm-op
	@[ "$$ETJ_TEST_KUBECONFIG" ] || $(BIN)/python -m testbed fetch || [ $$? = 3 ]  # 3: not on this machine, as tests say
	$(BIN)/pytest tests/cluster -m 'not own_api_server'

test-e2e: comm-op ## docs/kind.md as written and the demo, on kind (CLUSTER=kind, which is the default here)
	$(if $(filter-out kind,$(CLUSTER)),$(error test-e2e runs on kind only: expected CLUSTER=kind, found CLUSTER=$(CLUSTER)))$(BIN)/pytest tests/e2e

test-gpu: setup ## what needs one GPU (CUDA or ROCm): conversions and trainings there; skipped without one, not a part of `make test`
	DS_ACCELERATOR=cuda $(BIN)/pytest tests/gpu

test-touched: comm-op ## run whole what the change since BASE=commit touches, by the table of tests/touched.py
	$(BIN)/python -m tests.touched $(if $(BASE),--base $(BASE))

test-all: comm-op ## every test, and other random examples in every run, and more of them (hours); SECONDS=600 for the readers' fuzz targets
	ETJ_SOAK=1 $(BIN)/pytest -n auto tests/unit tests/property tests/golden
	ETJ_SOAK=1 $(BIN)/pytest tests/cluster
	ETJ_SOAK=1 $(BIN)/pytest tests/engine
	$(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),600) --seed $$(date +%s)

canary: setup | $(UV) ## the engine tier with the newest frameworks, and API servers of the newest Kubernetes (CANARY_ARGS=--list: only tell)
	$(BIN)/python -m canary --uv $(UV) $(CANARY_ARGS)

demo: setup ## the whole story on real parts: train, lose a node, reshard, resume, grow back; CLUSTER=kind: on kind
	$(BIN)/python -m demo $(if $(CLUSTER),--cluster $(CLUSTER)) $(DEMO_ARGS)

demo-lifecycle: setup ## a model from its first step to the text that it writes, over three frameworks (minutes)
	$(BIN)/python -m demo.lifecycle $(DEMO_ARGS)

bench: setup ## the resharder beside DeepSpeed's converter, on the same files
	$(BIN)/python -m benchmarks

simulate: setup ## what failures cost in 54 days on up to 16,384 GPUs, with the operator's own decisions (minutes)
	$(BIN)/python -m simulation $(SIMULATE_ARGS)

testbed-up: setup ## a real Kubernetes cluster on this machine, without Docker; CLUSTER=kind: on kind
	$(BIN)/python -m testbed $(filter kind,$(CLUSTER)) up

testbed-down: setup ## remove the test bed without a trace; CLUSTER=kind: the cluster on kind
	$(BIN)/python -m testbed $(filter kind,$(CLUSTER)) down

clean: ## remove what `make` made in the checkout
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
