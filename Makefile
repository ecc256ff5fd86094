# make serve         prepares .venv and the native module when needed, then starts the daemon
# make test          what CI runs: lint, native tests, all Python tests in their short form
# make bench         the daemon under load on the simulated engine, then the parts, then the built-in model
# make fuzz          long random runs against template, tokenizer, decoder and parsers
# make test-all      also native tests under ASan+UBSan and TSan, and the long form of the property tests
#
# PYTHON       the interpreter .venv is made from (3.11 to 3.14)
# TORCH_INDEX  the package index torch comes from, for a build other than the default one (CPU only, another CUDA)
# ARGS         handed to the command: make serve ARGS="--config conf/sim.toml"
PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=

comma := ,

VENV := .venv
BIN := $(VENV)/bin
# Two files at once: tests of daemons wait for them much of the time.
PYTEST := $(BIN)/pytest -q -n 2 --dist loadfile
VENV_STAMP := $(VENV)/.installed
NATIVE_STAMP := $(VENV)/.native
AI_SDK := build/ai_sdk/.installed
NATIVE_BUILD := build/native/build.ninja
NATIVE_SOURCES := native/CMakeLists.txt $(shell find native/include native/src native/bindings -name '*.h' -o -name '*.cc')

.PHONY: venv native serve test test-all lint test-native test-sanitized bench fuzz stub reference clean gateways agents ai-sdk litellm

venv: $(NATIVE_STAMP)
native: $(NATIVE_STAMP)

$(VENV_STAMP): requirements.lock
	@echo "Installing what requirements.lock names into $(VENV): minutes, and silent"
	$(PYTHON) -m venv $(VENV)
ifneq ($(TORCH_INDEX),)
	$(BIN)/pip install --quiet --index-url $(TORCH_INDEX) $$(grep '^torch==' requirements.lock)
endif
	$(BIN)/pip install --quiet -r requirements.lock
	touch $@

# --fresh: a build folder left by another .venv would go on building for its Python. It deletes what was compiled, so a
# source that changed does not come this way.
$(NATIVE_BUILD): $(VENV_STAMP)
	mkdir -p build
	$(BIN)/cmake --fresh -S native -B build/native -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	    -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python >build/native.log || { cat build/native.log; exit 1; }

$(NATIVE_STAMP): $(NATIVE_BUILD) $(NATIVE_SOURCES)
	$(BIN)/cmake --build build/native
	touch $@

serve: venv
	exec $(BIN)/python glm53d.py --config conf/nano-cpu.toml $(ARGS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/mypy

# Best effort: without node, npm or its registry the tests of the AI SDK are skipped.
$(AI_SDK): tests/ai_sdk/package-lock.json
	mkdir -p $(@D)
	cp tests/ai_sdk/*.json $(@D)
	npm ci --prefix $(@D) --no-audit --no-fund --ignore-scripts --loglevel=error --fetch-retries=1 --fetch-timeout=30000 \
	    && touch $@ || echo "The AI SDK is not installed"

ai-sdk: $(AI_SDK)

test: lint test-native ai-sdk
	$(PYTEST) $(ARGS)

test-all: lint test-native test-sanitized ai-sdk
	GLM53D_LONG=1 $(PYTEST) $(ARGS)

# $(call native-tests,folder,CMake options)
define native-tests
	$(BIN)/cmake -S native -B build/$(1) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	    -DGLM53D_TESTS=ON $(2) >/dev/null
	$(BIN)/cmake --build build/$(1)
	$(BIN)/ctest --test-dir build/$(1) --output-on-failure
endef

test-native: venv
	$(call native-tests,test)

test-sanitized: venv
	$(call native-tests,test-asan,-DGLM53D_SANITIZE=address$(comma)undefined)
	$(call native-tests,test-tsan,-DGLM53D_SANITIZE=thread)

bench: venv
	$(BIN)/python -m bench.e2e $(ARGS)
	for part in ring tree encode next_batch render decode pump parse mask gil model; do $(BIN)/python -m bench.micro.$$part || exit 1; done
	$(BIN)/python -m bench.nano.speed

# Random and mutated input against the parts that read what others wrote, for as long as the long profile takes.
fuzz: venv
	GLM53D_LONG=1 $(BIN)/pytest -q tests/property/test_template.py tests/property/test_encode.py \
	    tests/property/test_decode.py tests/property/test_parsers.py tests/property/test_pump.py

# Two daemons behind the gateways that people use; not in CI, because it installs these.
gateways: venv
	$(PYTHON) -m venv build/gateways
	build/gateways/bin/pip install --quiet sglang-router==0.3.2 smg==1.13.0
	$(BIN)/python -m tests.gateways.run build/gateways/bin

# The agents that people use, each through a tool loop against a daemon, where nothing but the loopback can be reached;
# not in CI, because it installs these: a gigabyte.
agents: venv
	npm install --prefix build/agents --no-audit --no-fund --ignore-scripts --loglevel=error \
	    @openai/codex@0.171.0 @anthropic-ai/claude-code@2.1.197 opencode-ai@1.18.33
	unshare --map-root-user --net $(BIN)/python -m tests.agents.run build/agents/node_modules/.bin

# LiteLLM against a daemon; not in CI, because it is 380 MB with what it needs.
litellm: venv
	$(PYTHON) -m venv build/litellm
	build/litellm/bin/pip install --quiet litellm==1.110.2
	$(BIN)/pytest -q tests/integration/test_litellm.py

# Two generated files that are committed; tests compare them with fresh ones.
stub: venv
	$(BIN)/python -m nanobind.stubgen -q -m glm53d._native -o glm53d/_native.pyi

reference: venv
	$(BIN)/python glm53d.py --print-reference >conf/reference.toml

clean:
	rm -rf build dist $(VENV) .pytest_cache .hypothesis .mypy_cache .ruff_cache glm53d/_native.*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
