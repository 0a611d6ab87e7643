# make serve      sets up .venv and serves the default model     (PORT=8000 MODEL=smollm2-135m-instruct ARGS="--max-num-seqs 64")
# make test       sets up .venv and runs lint, types, import rules and tests
# make aot-all    compiles the TPU attention kernels for every combination of settings on four chips: ten hours; wants libtpu
# make oracle     builds the reference environment (transformers on torch, Python 3.11) that the goldens can be checked against
PORT ?= 8000
MODEL ?= smollm2-135m-instruct
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin

.PHONY: serve test check lint types imports unit aot-all oracle bench format clean

serve: $(VENV)/.serve
	$(BIN)/jaxkv serve $(MODEL) --port $(PORT) $(ARGS)

test: lint types imports unit

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.dev
	$(BIN)/mypy

imports: $(VENV)/.dev
	$(BIN)/lint-imports --no-cache

unit: $(VENV)/.dev
	$(BIN)/pytest

aot-all: $(VENV)/.dev
	JAXKV_AOT_ALL=1 $(BIN)/pytest tests/pallas_kernels/ragged_paged_attention/test_mosaic_tpu_aot.py

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

.venv-oracle/.done: tests/oracle/requirements.txt tools/find_python.sh
	PYTHON="$$(sh tools/find_python.sh 3.11 exact)" && "$$PYTHON" -m venv .venv-oracle
	.venv-oracle/bin/python -m pip install --quiet --disable-pip-version-check -r tests/oracle/requirements.txt
	@touch $@

clean:
	rm -rf $(VENV) .venv-oracle
