# make serve      sets up .venv and serves the default model     (PORT=8000 MODEL=smollm2-135m-instruct ARGS="--max-num-seqs 64")
# make test       sets up .venv and runs lint, types, import rules and tests, and compiles the kernels for chips that are not here
# make oracle     builds the reference environment (transformers on torch, Python 3.11) that the goldens can be checked against
PORT ?= 8000
MODEL ?= smollm2-135m-instruct
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin

.PHONY: serve test lint types imports unit aot oracle bench format clean

serve: $(VENV)/.serve
	$(BIN)/jaxkv serve $(MODEL) --port $(PORT) $(ARGS)

test: lint types imports unit aot

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.dev
	$(BIN)/mypy

imports: $(VENV)/.dev
	$(BIN)/lint-imports --no-cache

unit: $(VENV)/.dev
	$(BIN)/pytest -m "not aot"

# Needs libtpu and ptxas, which exist for x86-64 Linux only.
ifeq ($(shell uname -s -m),Linux x86_64)
aot: .venv-aot/.done
	.venv-aot/bin/pytest -m aot tests/pallas_kernels tests/runtime
else
aot:
	@echo "ahead-of-time compilation for TPU and NVIDIA is tested on x86-64 Linux only: this is $(shell uname -s -m)"
endif

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.serve
	$(BIN)/python benchmarks/serving.py

oracle: .venv-oracle/.done

# A stamp file says what a .venv was made from: nothing is installed again until one of these files changes.
$(VENV)/.serve: pyproject.toml constraints.txt tools/find_python.sh
	PYTHON="$$(sh tools/find_python.sh 3.12)" && "$$PYTHON" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.serve
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

# Apart from .venv: a program that finds libtpu or the CUDA plugin looks for chips when it starts.
.venv-aot/.done: pyproject.toml constraints.txt tools/find_python.sh
	PYTHON="$$(sh tools/find_python.sh 3.12)" && "$$PYTHON" -m venv .venv-aot
	.venv-aot/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,aot]"
	@touch $@

.venv-oracle/.done: tests/oracle/requirements.txt tools/find_python.sh
	PYTHON="$$(sh tools/find_python.sh 3.11 exact)" && "$$PYTHON" -m venv .venv-oracle
	.venv-oracle/bin/python -m pip install --quiet --disable-pip-version-check -r tests/oracle/requirements.txt
	@touch $@

clean:
	rm -rf $(VENV) .venv-aot .venv-oracle
