# The two commands of the README are `make demo` and `make test`; both install what is missing first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BUF := node_modules/.bin/buf
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
SOURCES := nereus nereus_common benchmarks services/controller services/coordinator services/generation \
  services/inference services/training
NAMES := $(shell cd protos && ls nereus/v1/*.proto)

.PHONY: install demo test test-long check format protos generated contracts bench

install: $(VENV)/.installed

$(VENV)/.installed: requirements/cpu.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --no-deps -r requirements/cpu.lock
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	touch $@

demo: install
	$(BIN)/nereus demo

test: install
	$(PYTEST) -m "not long"

test-long: install
	$(PYTEST)

bench: install
	$(BIN)/python -m benchmarks --all

check: install contracts generated
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(SOURCES)
	$(BIN)/lint-imports
	$(PYTEST) -m fast

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(BUF): package-lock.json
	npm ci --no-audit --no-fund --silent
	touch $@

contracts: $(BUF)
	$(BUF) lint
	$(BUF) breaking --against protos/released.binpb

PROTOC = $(BIN)/python -m grpc_tools.protoc -I protos --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
  --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc --python_out=$(1) --grpc_python_out=$(1) \
  --mypy_out=quiet:$(1) --mypy_grpc_out=quiet,only_async:$(1) $(NAMES)

protos: install
	$(call PROTOC,.)

# The committed code is what protoc makes of the contracts now.
generated: install
	rm -rf build/generated && mkdir -p build/generated
	$(call PROTOC,build/generated)
	touch build/generated/nereus/v1/__init__.py
	diff -r -x __pycache__ build/generated/nereus/v1 nereus/v1
