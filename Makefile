# Targets for contributors; `make help` lists them. Everything is installed into the clone.

BIN := .venv/bin
STAMP := .venv/.lmkv-setup
RAY_STAMP := .venv-ray/.lmkv-setup
SGLANG_STAMP := .venv-sglang/.lmkv-setup
VLLM_PREVIOUS_STAMP := .venv-vllm-previous/.lmkv-setup
VLLM_NEXT_STAMP := .venv-vllm-next/.lmkv-setup
PROTOS := $(wildcard protos/lmkv/v1/*.proto protos/lmkv/internal/v1/*.proto)
NPM := client/typescript/package.json client/typescript/package-lock.json
NATIVE := CMakeLists.txt $(wildcard kernels/csrc/*)
IMAGES ?= ghcr.io/lmkv
CHARTS ?= oci://$(IMAGES)/charts
TARGETS ?=
VERSION := $(shell sed -n 's/^version = "\([0-9].*\)"/\1/p' pyproject.toml)
BUF ?= $(shell test -x .buf/node_modules/.bin/buf && echo .buf/node_modules/.bin/buf || echo buf)

export PATH := $(CURDIR)/$(BIN):$(PATH)
export PYTHONUNBUFFERED := 1
# Containers often set it: then each of the hundreds of processes that tests start would compile lmkv again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help nightly fix setup setup-ray setup-sglang setup-vllm-previous setup-vllm-next demo test test-all test-models test-cpp-engine test-envoy test-ray test-sglang test-vllm-previous test-vllm-next chaos histories soak audits mutants mutation models fuzz fuzz-kernels audit docs docs-publish protos wheel sdist wheels images images-publish images-reproducible cluster cluster-first-image chart chart-publish release-publish version verify \
	benchmarks kv-events verify-format verify-lint verify-types verify-protos verify-floors verify-typescript verify-workflows verify-vllm \
	fix-bounds fix-format fix-lint fix-locks fix-metrics fix-protos fix-typescript

# Targets with two number signs are listed, those with one only by `make help ARGS=--all`.
help: ## list the targets; ARGS=--all lists all
	@awk -F ':.*##? ' '/^[a-z-]+:.*$(if $(filter --all,$(ARGS)),##?,##) / { printf "make %-20s %s\n", $$1, $$2 }' Makefile
	@echo 'ARGS="..." is passed on by demo and test: make demo ARGS="--json numbers.json", make test ARGS="tests/rpc -x"'

setup: $(STAMP) ## install lmkv, vLLM for CPUs and all tools into .venv and .buf

$(STAMP): pyproject.toml scripts/setup $(NATIVE) $(NPM)
	@scripts/setup
	@touch $@

setup-ray: $(RAY_STAMP) # install Ray Serve into .venv-ray, on top of .venv

$(RAY_STAMP): $(STAMP) pyproject.toml scripts/setup-ray
	@scripts/setup-ray
	@touch $@

setup-sglang: $(SGLANG_STAMP) # install SGLang for CPUs into .venv-sglang, on top of .venv

$(SGLANG_STAMP): $(STAMP) pyproject.toml scripts/setup-sglang
	@scripts/setup-sglang
	@touch $@

setup-vllm-previous: $(VLLM_PREVIOUS_STAMP) # install the oldest supported vLLM for CPUs into .venv-vllm-previous, on top of .venv

$(VLLM_PREVIOUS_STAMP): $(STAMP) pyproject.toml scripts/setup-vllm-previous
	@scripts/setup-vllm-previous
	@touch $@

setup-vllm-next: $(VLLM_NEXT_STAMP) # install a vLLM without a build for CPUs into .venv-vllm-next, on top of .venv

$(VLLM_NEXT_STAMP): $(STAMP) pyproject.toml scripts/setup-vllm-next
	@scripts/setup-vllm-next
	@touch $@

demo: $(STAMP) ## run a coordinator and two engines that share a prompt
	@$(BIN)/lmkv demo $(ARGS)

PYTEST = $(BIN)/python -m pytest --dist loadscope --no-loadscope-reorder -m 'not more_models'

test: $(STAMP) ## run the core of the tests, also with real engines; ARGS="tests/helm -x" selects among all tests
	@$(PYTEST) -n 4 --suite core $(ARGS)

test-all: $(STAMP) ## run the other tests: more engines, charts, wheels, browsers, SDKs, linters
	@$(PYTEST) -n 3 --suite rest $(ARGS)

nightly: ## run the long suites, for hours: all models, other engines, chaos, histories, soak, fuzzing, mutants
	@for suite in test-models test-cpp-engine test-envoy test-ray test-sglang test-vllm-previous test-vllm-next \
		chaos histories soak audits models fuzz fuzz-kernels mutants; do $(MAKE) $$suite || failed="$$failed $$suite"; done; \
		[ -z "$$failed" ] || { echo "nightly: failed:$$failed"; exit 1; }

test-models: $(STAMP) # run the tests with engines of all architectures, and four ranks; ARGS="-k gpt_oss" selects one
	@$(BIN)/python -m pytest -n 2 --dist loadscope tests/engines/test_architectures.py tests/engines/test_pd_parts.py \
		tests/engines/test_pipeline_of_tensor_ranks.py tests/engines/test_reuse.py $(ARGS)

test-cpp-engine: $(STAMP) # compile and run the engine in C++ of docs/examples; as root, installs Debian's packages for it
	@scripts/setup-cpp-engine
	@$(BIN)/python -m pytest tests/sdk/test_cpp_engine.py $(ARGS)

test-envoy: $(STAMP) build/tools/envoy/.lmkv-setup # run the endpoint picker's tests with Envoy
	@LMKV_ENVOY=$(CURDIR)/build/tools/envoy/bin/envoy \
		$(BIN)/python -m pytest tests/server/proxy/picker/test_envoy.py $(ARGS)

test-ray: $(RAY_STAMP) # run the tests with Ray Serve
	@.venv-ray/bin/python -m pytest tests/ray $(ARGS)

test-sglang: $(SGLANG_STAMP) # run the tests with SGLang
	@.venv-sglang/bin/python -m pytest tests/sglang $(ARGS)

test-vllm-previous: $(VLLM_PREVIOUS_STAMP) # run the connector's tests, and engines, with the oldest supported vLLM
	@.venv-vllm-previous/bin/python -m pytest -n 2 --dist loadscope tests/client/connector tests/client/test_plugin.py \
		tests/engines/test_outputs.py $(ARGS)

test-vllm-next: $(VLLM_NEXT_STAMP) # run the connector's tests, and engines, with the newest supported vLLM
	@.venv-vllm-next/bin/python -m pytest -n 2 --dist loadscope tests/client/connector tests/client/test_plugin.py \
		tests/engines/test_outputs.py tests/engines/test_reuse.py tests/engines/test_pd.py \
		tests/engines/test_features.py tests/engines/test_server.py $(ARGS)

benchmarks: $(STAMP) ## run all benchmarks with --quick, about 30 minutes on an idle machine
	@$(BIN)/python -m benchmarks --quick $(ARGS)

chaos: $(STAMP) # inject faults into a fleet for ten minutes and check that no data is wrong and nothing is left behind
	@LMKV_CHAOS_SECONDS=$${LMKV_CHAOS_SECONDS:-600} $(BIN)/python -m pytest -q --junitxml=build/chaos.xml tests/chaos $(ARGS)

histories: $(STAMP) # record all calls of a fleet under faults for an hour, and check them against the protos' promises
	@LMKV_HISTORIES_SECONDS=$${LMKV_HISTORIES_SECONDS:-3600} $(BIN)/python -m pytest -q --junitxml=build/histories.xml tests/histories $(ARGS)

soak: $(STAMP) # run a fleet under load for an hour and check that memory, files, threads, tasks and latency do not rise
	@LMKV_SOAK_SECONDS=$${LMKV_SOAK_SECONDS:-3600} LMKV_SOAK_OUTPUT=$${LMKV_SOAK_OUTPUT:-build/soak} $(BIN)/python -m pytest -q tests/soak $(ARGS)

audits: $(STAMP) # audit 20,000 honest chunks of all architectures, and fail if one is suspect; ARGS="--only llama --chunks 500" selects
	@$(BIN)/python -m tests.engines.audit_run $(ARGS)

kv-events: $(STAMP) # compare an index built from KV events with the layout map over a recorded trace: make kv-events TRACE=FILE
	@LMKV_EVENTS_TRACE=$(TRACE) $(BIN)/python -m pytest -q -s tests/client/test_kv_events_trace.py $(ARGS)

models: $(STAMP) # explore small models of the pool, handoffs, registration, the shared map and tails, a minute each
	@$(BIN)/python -m tests.models $(ARGS)

fuzz: .venv/.lmkv-fuzz # run all fuzz targets for an hour; ARGS="configuration --seconds 60" selects
	@$(BIN)/python -m tests.fuzz $(ARGS)

.venv/.lmkv-fuzz: $(STAMP)
	@$(BIN)/python -m pip install -qq --group fuzz
	@touch $@

fuzz-kernels: # run the C++ kernels with generated inputs and sanitizers for ten minutes; needs clang 19
	@python3 -m tests.fuzz.kernels $(ARGS)

mutants: $(STAMP) # apply seeded faults to a copy, one at a time, and show the test that catches each; ARGS="node-" selects
	@$(BIN)/python -m tests.mutants $(ARGS)

mutation: $(STAMP) build/tools/mutation/.lmkv-setup # change pure modules at random places and show what no test notices; ARGS="--module lmkv.keys --sample 100"
	@$(BIN)/python -m tests.mutants.generated $(ARGS)

docs: build/tools/docs/.lmkv-setup ## build the documentation site into build/site; ARGS=--serve serves it while you write
	@NO_MKDOCS_2_WARNING=1 build/tools/docs/bin/mkdocs $(if $(filter --serve,$(ARGS)),serve,build)

docs-publish: build/tools/docs/.lmkv-setup # add the site to the branch gh-pages and push it: make docs-publish ARGS="main"
	@PATH=$(CURDIR)/build/tools/docs/bin:$(PATH) scripts/docs-publish $(ARGS)

wheel: $(STAMP) ## build the sdist and a wheel for this Python, or PYTHON=python3.13, into dist/
	@scripts/wheel $(PYTHON)

sdist: build/tools/package/.lmkv-setup # build the sdist into dist/
	@build/tools/package/bin/python -m build --no-isolation --sdist --outdir dist

wheels: build/tools/package/.lmkv-setup # build the wheels of a release with cibuildwheel into dist/; needs Docker
	@build/tools/package/bin/python -m cibuildwheel --platform linux --output-dir dist $(ARGS)

audit: $(STAMP) build/tools/audit/.lmkv-setup ## check locks, licences and known vulnerabilities
	@$(BIN)/python scripts/audit $(ARGS)

fix-locks: build/tools/audit/.lmkv-setup # resolve the hash-locked packages of the images again
	@build/tools/audit/bin/python scripts/audit --fix-locks

images: ## build the container images with Docker or buildah; TARGETS="lmkv" selects
	@python3 scripts/images --registry $(IMAGES) --version $(VERSION) $(TARGETS)

images-publish: # push the images that are built to their registry; IMAGES and TARGETS as above, ARGS=--dry-run shows them
	@python3 scripts/images --publish --registry $(IMAGES) --version $(VERSION) $(TARGETS) $(ARGS)

images-reproducible: # build images twice with buildah and compare them byte by byte; TARGETS="lmkv" selects
	@python3 scripts/compare-builds --version $(VERSION) $(or $(TARGETS),lmkv lmkv-node)

cluster: ## run the chart's pods with Podman and check the fleet; ARGS="nodes drain" selects cases
	@$(MAKE) --silent -j2 build/tools/cluster/.lmkv-setup $(if $(filter --no-build,$(ARGS)),,cluster-first-image)
	@build/tools/cluster/bin/python -m tests.cluster --registry $(IMAGES) $(ARGS)

chart: build/tools/chart/.lmkv-setup ## lint the Helm chart and package it into dist/
	@build/tools/chart/bin/python scripts/chart

chart-publish: build/tools/chart/.lmkv-setup # push the chart in dist/ to CHARTS=oci://ghcr.io/lmkv/charts; ARGS=--dry-run shows it
	@build/tools/chart/bin/python scripts/chart --publish $(CHARTS) --version $(VERSION) $(ARGS)

release-publish: # create the GitHub release of the version's tag with all files in dist/; ARGS=--dry-run shows it
	@python3 scripts/release --version $(VERSION) $(ARGS)

version: # print lmkv's version
	@echo $(VERSION)

# The tools of one dependency group, where nothing else is needed. The file says that all of them are installed.
build/tools/%/.lmkv-setup: pyproject.toml
	@python3 -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install -qq --upgrade 'pip>=25.1'
	@$(@D)/bin/python -m pip install -qq --group $*
	@touch $@

# The checks of pods store chunks as engines do, with lmkv itself, but without vLLM and PyTorch.
build/tools/cluster/.lmkv-setup: pyproject.toml $(NATIVE)
	@echo "cluster: building lmkv and installing it with what the checks of pods need, into $(@D)"
	@python3 -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install -qq --upgrade 'pip>=25.1'
	@$(@D)/bin/python -m pip install -qq -e '.[tokenizers]' --group chart
	@touch $@

# Builds the stages that all images share while the environment is installed. The checks build the image again, from these
# layers, and report a failure.
cluster-first-image:
	@mkdir -p build/cluster/images
	@if [ "$$(id -u)" = 0 ]; then python3 scripts/images --builder buildah --registry $(IMAGES) --version $(VERSION) lmkv; fi \
		>build/cluster/images/first.log 2>&1 || true

protos: fix-protos ## generate the stubs and docs/reference/api.md from protos/

verify: verify-format verify-lint verify-types verify-protos verify-floors verify-typescript verify-workflows ## check format, lint, types, protos, layers, TypeScript and workflows

fix: fix-format fix-lint fix-bounds fix-metrics fix-floors ## format, apply lint fixes, and write what follows from the code into the pages

# Format and lint need neither vLLM nor Node: without `make setup` they use an environment with the linters alone.
LINT := $(if $(wildcard $(STAMP)),,build/tools/lint/.lmkv-setup)
LINT_BIN := $(if $(wildcard $(STAMP)),$(BIN),build/tools/lint/bin)

verify-format: $(LINT) # check the formatting
	@$(LINT_BIN)/ruff format --check --diff

fix-format: $(LINT) # format
	@$(LINT_BIN)/ruff format

verify-lint: $(LINT) # lint
	@$(LINT_BIN)/ruff check

fix-lint: $(LINT) # apply automatic lint fixes
	@$(LINT_BIN)/ruff check --fix

verify-types: $(STAMP) # check the types
	@$(BIN)/mypy

verify-protos: $(STAMP) # check the style of the protos, breaking changes, and that the stubs are up to date
	@$(BUF) lint
	@BUF=$(BUF) scripts/breaking
	@$(BIN)/python -m pytest -q tests/promises/test_protos.py

fix-protos: $(STAMP)
	@$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=. --grpc_python_out=. --mypy_out=. --mypy_grpc_out=. $(PROTOS)
	@$(BIN)/python -m grpc_tools.protoc -Ilmkv/ext_proc=protos/envoy/service/ext_proc/v3 --python_out=. --grpc_python_out=. \
		--mypy_out=. --mypy_grpc_out=. lmkv/ext_proc/external_processor.proto
	@$(BUF) generate --template client/typescript/buf.gen.yaml
	@$(BIN)/python scripts/api-reference

verify-typescript: $(STAMP) # check format, style and types of the TypeScript package
	@cd client/typescript && npm run --silent verify

fix-typescript: $(STAMP) # format it and apply automatic lint fixes
	@cd client/typescript && npm run --silent fix

verify-workflows: $(LINT) # check the GitHub workflows with actionlint
	@$(LINT_BIN)/actionlint

verify-floors: $(STAMP) # check the import contracts
	@$(BIN)/lint-imports

fix-floors: $(STAMP) # regenerate docs/contribute/packages.md from the import contracts and docstrings
	@$(BIN)/python scripts/architecture

fix-bounds: $(STAMP) # regenerate the numbers and the table of places of tests/bounds.md from the code
	@$(BIN)/python scripts/bounds

fix-metrics: $(STAMP) # regenerate docs/reference/metrics.md from the metrics in the code
	@$(BIN)/python scripts/metrics-reference

verify-vllm: # check that the newest vLLM has what the connector relies on; VLLM=0.32.0 names another version
	@scripts/verify-vllm $(VLLM)
