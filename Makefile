PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BUF := node_modules/.bin/buf

.PHONY: install demo test test-long check bench protos format

install: $(VENV)/.installed

$(VENV)/.installed: requirements/cpu.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --no-deps -r requirements/cpu.lock
	$(BIN)/pip install -q --no-deps -e .
	touch $@

protos:
	$(BIN)/python -m grpc_tools.protoc -I protos --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
	  --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc --python_out=. --grpc_python_out=. \
	  --mypy_out=quiet:. --mypy_grpc_out=quiet,only_async:. $$(cd protos && ls nereus/v1/*.proto | sort)
