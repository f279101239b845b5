# make demo: install into .venv and stream from the bundled model.  make test: install and run the suite.
PYTHON ?= python3
unexport PYTHON  # tinygrad reads a variable of this name
VENV := .venv
BIN := $(VENV)/bin
INSTALL := PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet
TORCH ?= torch==2.13.0

# a clang of 16 or later compiles the CPU kernels; without one, the wheel ziglang brings a whole clang
CLANG := $(shell clang --version 2>/dev/null | sed -n 's/.*version \([0-9]*\).*/\1/p' | head -n 1)
EXTRA := $(shell [ "$(CLANG)" -ge 16 ] 2>/dev/null || echo clang)

CHECKS := tests/test_house.py tests/test_words.py tests/test_docs.py tests/config tests/test_package.py tests/test_request.py tests/cache tests/scheduler \
  tests/backends/test_registry.py tests/ops/test_linear.py tests/ops/test_attention.py tests/quant tests/weights/test_gguf.py tests/runner/test_prepare.py \
  tests/sampling/test_sampler.py tests/engine/test_engine.py tests/engine/test_decode_reuse.py tests/text/test_chat.py tests/server/core tests/cli
# files go to the two processes in the order of tests/conftest.py
TESTS := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
SOURCES = $(shell find kernels -name '*.c' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' -o -name '*.metal')

.PHONY: demo check test test-long test-peers test-ray test-image test-gpu-dry lint bench clean

demo: $(VENV)/.core
	$(BIN)/python main.py --prompt "Once upon a time" --max-tokens 256 --temperature 0.7 --seed 10

test: $(VENV)/.test
	$(TESTS) --durations 30 --durations-min 3

test-long: $(VENV)/.test
	$(TESTS) --durations 30 --durations-min 3 -m long

test-peers: $(VENV)/.peers
	$(TESTS) tests/peers

# Ray Serve on a local cluster of several processes
test-ray: $(VENV)/.ray
	$(BIN)/python -m pytest -m ray -W default tests/integrations

# the container file builds, and its image answers a request and ends by SIGTERM: as root, with Debian's tools (tests/image.sh)
test-image:
	bash tests/image.sh

# what a GPU machine would run, on an emulated GPU that launches nothing; Python 3.12 where there is one, no C compiler
test-gpu-dry:
	benchmarks/gpu_dry.sh

# what to run before a commit: lint, the layout, and one fast test of each room; under two minutes
check: lint $(VENV)/.test
	$(TESTS) $(CHECKS)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(SOURCES)
	$(BIN)/mypy

bench: $(VENV)/.core
	$(BIN)/python -m benchmarks.latency

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: $(PYTHON) is older than Python 3.11; say make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip

$(VENV)/.core: $(VENV)/bin/python pyproject.toml
	$(INSTALL) --editable ".$(if $(EXTRA),[$(EXTRA)])"
	@touch $@

$(VENV)/.test: $(VENV)/.core
	$(INSTALL) --editable ".[test]"
	@touch $@

$(VENV)/.lint: $(VENV)/.core
	$(INSTALL) --editable ".[lint,server,structured]"  # mypy reads their types
	@touch $@

$(VENV)/.peers: $(VENV)/.test
	$(INSTALL) "$(TORCH)"
	$(INSTALL) --editable ".[peers]"
	@touch $@

$(VENV)/.ray: $(VENV)/.test
	$(INSTALL) --editable ".[ray]"
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
