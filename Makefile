# The commands of a fresh clone: `make demo`, `make test`, and `make check` for every edit. They need
# Python (3.10 or newer, with venv) and nothing else; everything is installed into .venv, pinned by
# constraints.txt.
#
#   PYTHON=python3.12   another interpreter for .venv
#   TORCH_INDEX=URL     an extra package index for torch (its CPU build is smaller and serves here)
#   DEMO="--seqlen 256" arguments of the demo
#   TESTS="tests/operator -k paged"  arguments of pytest

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What is installed: PyTorch, then what the demo needs, or what the tests and bench need as well.
TORCH_STAMP := $(VENV)/installed-torch
DEMO_STAMP := $(VENV)/installed-demo
STAMP := $(VENV)/installed
DEMO ?=
TESTS ?= -n 2 --dist worksteal --durations 10
# Names of those that the dynamic scheduler and Hopper's kernels run; test-all has more of them.
NAMES ?= (test_lengths or batch or more_tiles or visible or named_masks or any_pages or nvfp4) and not (full and (lengths or backward))
CLC_NAMES ?= (test_lengths and causal and backward) or more_tiles
ALL_NAMES := lengths or batch or tiles or visible or fp16 or named or any_pages or nvfp4
KERNEL_TESTS = tests/operator/attention/test_forward.py tests/operator/attention/test_backward.py
CLC_TESTS ?= $(KERNEL_TESTS) -k "($(CLC_NAMES)) and not negative"
SIMULATOR_TESTS ?= sm100_sim/tests --durations 10
LAB_TESTS ?= -n 2 --dist worksteal lab/tests
# One core for a process that has no workers.
ONE_CORE := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 SM100_SIM_THREADS=1
# Set by test-all.
CASES ?=
CUDA_TESTS ?= -n 8 tests/operator
HOPPER_TESTS ?= --arch sm_90a $(KERNEL_TESTS) -k "($(NAMES)) and not negative" tests/operator/masks_and_scores/test_block_mask.py \
    tests/operator/masks_and_scores/test_block_mask_backward.py tests/operator/cache/test_any_pages.py tests/operator/cache/test_nvfp4_cache.py
# What is imported is compiled then; compiling all of it would take half of the installation's time.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt

DOCS_STAMP := $(VENV)/installed-docs
ENGINES := build/engines
RUBIN := build/rubin

.PHONY: demo docs check check-tests test test-all test-engines test-rubin test-lab test-static test-short test-clc \
    test-hopper test-simulator lint types clean hub-kernel \
    test-cuda test-cuda-static test-cuda-clc test-cuda-memory test-cuda-sanitizers

demo: $(DEMO_STAMP)
	$(BIN)/python -m fa4_hd256 demo $(DEMO)

# What every edit should pass, in little more than a minute: lint, types, style and, of each room,
# tests that are quick. Types go beside the tests, which leave a core free while they start.
check: $(STAMP)
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint types check-tests

check-tests: $(STAMP)
	$(BIN)/python -m pytest -q -n 2 @tests/check.txt

# The most telling case of each kind: 9 to 18 minutes on two cores from empty caches. All parts run
# whatever the others say; one that fails makes the whole fail. The other parts, one process after
# the other, go beside the two workers of the longest: a worker waits now and then for a kernel
# that another one compiles, and a core would be idle.
test: $(STAMP)
	@$(MAKE) --no-print-directory --keep-going --jobs=2 test-static test-short

test-short: $(STAMP)
	@$(MAKE) --no-print-directory --keep-going --jobs=1 --output-sync=target types test-clc test-hopper test-simulator

# Every test, with all cases of those that are marked sampled.
test-all:
	@$(MAKE) --no-print-directory test CASES=--all-cases NAMES="$(ALL_NAMES)" CLC_NAMES="$(ALL_NAMES)"

# Engines' own classes with our backends. Their wheels come without what these require: only modules
# that the tests import are installed (tests/engines.txt).
test-engines: $(ENGINES)/installed
	PYTHONPATH=$(ENGINES) $(BIN)/python -m pytest $(CASES) tests/operator/integrations/test_vllm_*.py \
	    tests/bench/commands/test_vllm_serving.py
	PYTHONPATH=$(ENGINES) $(BIN)/python -m pytest --all-cases tests/operator/integrations/test_sglang_backend.py \
	    tests/bench/commands/test_sglang_serving.py

$(ENGINES)/installed: $(STAMP) tests/engines.txt
	$(PIP_INSTALL) --target $(ENGINES) --upgrade --no-deps -r tests/engines.txt
	touch $@

# Kernels for sm_107a. CuTe DSL takes the newest of its libraries, so those of CUDA 13 come in a folder
# that no other test sees.
test-rubin: $(RUBIN)/installed
	PYTHONPATH=$(abspath $(RUBIN)) $(BIN)/python -m pytest --all-cases tests/operator/gpus/test_rubin.py

$(RUBIN)/installed: $(STAMP) constraints.txt
	$(PIP_INSTALL) --target $(RUBIN) --upgrade --no-deps nvidia-cutlass-dsl-libs-base \
	    nvidia-cutlass-dsl-libs-core nvidia-cutlass-dsl-libs-cu13
	touch $@

# Tests of the lab, which `make test` leaves out.
test-lab: $(STAMP)
	$(BIN)/python -m pytest $(LAB_TESTS)

# All tests but those of the simulator, under the static scheduler.
test-static: $(STAMP)
	$(BIN)/python -m pytest -o testpaths=tests $(TESTS) $(CASES)

# A part of them under the dynamic scheduler.
test-clc: $(STAMP)
	$(ONE_CORE) FA_CLC=1 $(BIN)/python -m pytest $(CLC_TESTS) $(CASES)

# The same part, of Hopper's kernels.
test-hopper: $(STAMP)
	$(ONE_CORE) $(BIN)/python -m pytest $(HOPPER_TESTS) $(CASES)

test-simulator: $(STAMP)
	$(ONE_CORE) $(BIN)/python -m pytest $(SIMULATOR_TESTS) $(CASES)

# On a GPU: the operator's tests under both schedulers, those of memory again by themselves, where
# what the driver has left is this process's doing, then compute-sanitizer.
test-cuda: $(STAMP)
	@$(MAKE) --no-print-directory --keep-going --jobs=1 test-cuda-static test-cuda-clc \
	    test-cuda-memory test-cuda-sanitizers

test-cuda-static: $(STAMP)
	$(BIN)/python -m pytest --device cuda $(CUDA_TESTS)

test-cuda-clc: $(STAMP)
	FA_CLC=1 $(BIN)/python -m pytest --device cuda $(CUDA_TESTS)

test-cuda-memory: $(STAMP)
	$(BIN)/python -m pytest --device cuda tests/operator/cuda/test_cuda_memory.py

test-cuda-sanitizers: $(STAMP)
	$(BIN)/python -m bench bringup --stages sanitizer

# The pages and the API reference as a site in build/docs; a link to nothing fails.
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# The Hugging Face kernel, in build/hub.
hub-kernel: $(DEMO_STAMP)
	$(BIN)/python -m fa4_hd256.integrations.hub build/hub

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .

types: $(STAMP)
	$(BIN)/python -m mypy

# torch goes first and alone: an index given for it must not serve any other package.
$(TORCH_STAMP): pyproject.toml sm100_sim/pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("Python 3.10 or newer is needed; choose one with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	touch $@

# Package and simulator, a distribution of its own, are installed in place, so that the tests run the
# files of this checkout.
$(DEMO_STAMP): $(TORCH_STAMP)
	$(PIP_INSTALL) --editable ./sm100_sim --editable '.[demo]'
	touch $@

# All of the demo's is among it. cuDNN's kernels for sm100_sim/tests come alone: what they need is here
# already, and the CUDA 13 libraries that they require besides would change the compiler of everything else.
$(STAMP): $(TORCH_STAMP)
	$(PIP_INSTALL) --editable ./sm100_sim --editable '.[test,bench]'
	$(PIP_INSTALL) --no-deps nvidia-cudnn-frontend
	touch $(DEMO_STAMP) $@

$(DOCS_STAMP): $(DEMO_STAMP)
	$(PIP_INSTALL) --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) .cache build .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info sm100_sim/build sm100_sim/.cache sm100_sim/src/*.egg-info
