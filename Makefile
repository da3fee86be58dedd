# `make demo` and `make test` set up their own environment in .venv and need nothing but Python 3.11+ and a network.

PYTHON ?= python3
VENV ?= .venv
# Any torch from 2.10 on will do. Another version, or a build of your choice: make TORCH=..., or VENV=an environment that
# already has torch, which is then kept.
TORCH ?= torch==2.13.0
BIN = $(VENV)/bin
READY = $(VENV)/.ready
LINKS = typings/deepseek_attn/kernels typings/deepseek_attn/models
# packages are installed without bytecode, which each process would otherwise make of torch anew: two seconds each time
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-gpu exhaustive check bench experiment docs clean

demo: $(READY)
	$(BIN)/deepseek-attn generate --prompt "Once upon a time" --temperature 0 --max-tokens 48

test: $(READY) check
	$(BIN)/python -m pytest -n auto --dist worksteal

test-all: test exhaustive

# more sizes and variants, and kernels compiled for every GPU generation
exhaustive: $(READY)
	$(BIN)/python -m pytest -n auto --dist worksteal -m exhaustive

# the tests on a GPU, whose memory GPU_WORKERS processes share. Its time is limited: interrupted, pytest still names what
# failed. Kernels are compiled for the GPU at hand, and not for others as well; rooms that use no device are left out.
GPU_WORKERS ?= 14
GPU_SECONDS ?= 900
test-gpu: $(READY)
	DEEPSEEK_ATTN_TEST_DEVICE=cuda timeout --signal=INT --kill-after=60 $(GPU_SECONDS) \
	    $(BIN)/python -m pytest -n $(GPU_WORKERS) --dist worksteal -p no:benchmark -k "not compil" \
	    $(foreach room,bare house text config estimates utils,--ignore=tests/$(room)) $(GPU_TESTS)

check: $(READY) $(LINKS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# where pyright, in an editor too, finds the packages whose folders are not below deepseek_attn
$(LINKS):
	mkdir -p $(@D)
	ln -sfn ../../$(@F) $@

experiment: $(READY)
	$(BIN)/deepseek-attn experiment resume smoke

bench: $(READY)
	$(BIN)/python scripts/bench_transformers.py

# the documentation site in build/site; a broken link, anchor or name is an error
docs: $(READY)
	$(BIN)/python -c "import mkdocstrings" 2>/dev/null || $(BIN)/python -m pip install --quiet --no-compile -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install --quiet --no-compile $(TORCH)
	$(BIN)/python -m pip install --quiet --no-compile -e ".[test,check]"
	touch $(READY)

clean:
	rm -rf $(VENV) build *.egg-info
