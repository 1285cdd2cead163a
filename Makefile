# To begin with: make demo | test. Before a change lands: lint | test | test-all (campaigns) | versions (oldest and newest torch).
# On GPUs: prove-gpu; without them: prove-gpu-path | te-extension. Held against others: against-megatron | oracle.
# Under faults: faults | soak | soak-bucket. Measured: bench | bench-checkpoint | bench-data | monitoring. A site: docs. Packages: setup | clean.
# In a container that brings torch and TE: make ... VENV=system
SHELL := /bin/bash
VENV ?= .venv
WORKERS ?= 2
ifeq ($(VENV),system)
PYTHON := python3
READY := .venv-system-checked
else
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready
endif
BASE_PYTHON := $(shell command -v python3.12 || ls $${HOME}/.pyenv/versions/3.12.*/bin/python3.12 2>/dev/null | tail -n 1)
TE_VERSION := $(shell sed -n 's/^te = .*==\([0-9.]*\)".*/\1/p' pyproject.toml)
export OMP_NUM_THREADS ?= 1
# Containers often set it: then each program that a test starts compiles our modules anew, 0.4 of 0.9 s of its CPU time.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test test-all versions setup lint docs bench bench-checkpoint prove-gpu prove-gpu-path te-extension against-megatron faults oracle soak soak-bucket monitoring bench-data clean
demo: setup
	$(PYTHON) pretrain_gpt.py slurm/recipes/demo.toml

# Files of tests are dealt to WORKERS processes; 1 to 2 cores each.
test: setup .te/.ready
	$(PYTHON) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_FLAGS)

# With every campaign: layouts, families, GPU code, the oracle, faults, soaks; hours. docs/benchmarks/test_all.json says what came of it;
# tests.campaigns --mend goes on where one was interrupted.
test-all: setup .te/.ready te-extension
	$(PYTHON) -m tests.campaigns --workers $(WORKERS)

# A part of the suite with the oldest and the newest torch of pyproject.toml's range; about 6 GB each, the first time.
versions: setup .te/.ready .venv-oldest/.ready .venv-newest/.ready
	$(PYTHON) -m tests.versions .venv-oldest .venv-newest

setup: $(READY)

lint: setup
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check --quiet .
	$(PYTHON) -m mypy
	$(PYTHON) tests/house/wording.py

# A site in build/site; its packages (pyproject.toml's extra "docs") need neither torch nor the rest.
docs: .venv-docs/.ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict
	@echo "build/site/index.html"

bench: setup
	$(PYTHON) -m tests.benchmarks step

bench-checkpoint: setup
	$(PYTHON) -m tests.benchmarks checkpoint

# Megatron-LM is no package: MEGATRON_LM=its checkout. mosaicml-streaming and litdata are measured where installed.
bench-data: setup
	$(PYTHON) -m tests.benchmarks data $(if $(MEGATRON_LM),--megatron_lm $(MEGATRON_LM))

prove-gpu: setup
	$(PYTHON) -m tests.gpu

# GPU code without a GPU, on an emulated device: all that `make test` leaves out of tests/gpu_path.
prove-gpu-path: setup .te/.ready te-extension
	$(PYTHON) -m pytest -n $(WORKERS) --campaign tests/gpu_path

# The source of Transformer Engine's extension, whose bindings tests/gpu_path/te/real.py compiles by g++.
te-extension: .te-extension/.ready

# Collectives of a step and losses of twins, on that device, beside Megatron-LM's program: MEGATRON_LM=its checkout.
against-megatron: setup .te/.ready
	PYTHONPATH=tests/support $(PYTHON) -m tests.gpu_path.megatron_lm --megatron_lm $(MEGATRON_LM)

faults: setup
	$(PYTHON) -m tests.faults

# Training held against transformers, PyTorch and Megatron's scheduler, over drawn recipes; half an hour. Goes on where it was interrupted.
oracle: setup
	$(PYTHON) -m tests.oracle --cases 400 --output runs/oracle --write_page

# A supervised run with faults at random moments, and whether its report tells that story.
MINUTES ?= 30
soak: setup
	$(PYTHON) -m tests.faults.soak --minutes $(MINUTES)

# Runs through stages, out of a bucket and into one, killed and failed by the server: each must end as an undisturbed one.
soak-bucket: setup
	$(PYTHON) -m tests.faults.bucket_soak --minutes $(MINUTES)

# Needs Debian's prometheus and prometheus-node-exporter. MLFLOW=the program mlflow of the whole package tries its server, too.
monitoring: setup
	$(PYTHON) -m tests.monitoring $(if $(MLFLOW),--mlflow $(MLFLOW))

# Versions come from constraints.txt, packages from pyproject.toml; the editable install makes `python tools/x.py` work.
.venv/.ready: pyproject.toml constraints.txt
	@test -n "$(BASE_PYTHON)" || { echo "Triplane needs Python 3.12 (python3.12 on the PATH, or pyenv's 3.12): none was found." >&2; exit 1; }
	@echo "installing into .venv (about 5 GB with torch; several minutes the first time)"
	$(BASE_PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[test]"
	touch $@

# Versions come from constraints.txt, but for torch and what it brings. No editable install: run from the checkout.
# The packages of pyproject.toml and of the extras named behind it, but for torch.
LISTED := python3 -c 'import sys, tomllib; \
	project = tomllib.load(open("pyproject.toml", "rb"))["project"]; extras = project["optional-dependencies"]; \
	listed = project["dependencies"] + [one for extra in sys.argv[1:] for one in extras[extra]]; \
	print(*(one.replace(" ", "") for one in listed if not one.startswith(("torch", "triplane"))), sep="\n")'
BROUGHT := ^(torch|triton|setuptools|cuda-[a-z]+|nvidia-(cu|nccl|nv).*)==
.venv-oldest/.ready .venv-newest/.ready: .venv-%/.ready: pyproject.toml constraints.txt | $(READY)
	@test -n "$(BASE_PYTHON)" || { echo "Triplane needs Python 3.12 (python3.12 on the PATH, or pyenv's 3.12): none was found." >&2; exit 1; }
	$(BASE_PYTHON) -m venv .venv-$*
	grep -vE '$(BROUGHT)' constraints.txt > .venv-$*/constraints.txt
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --constraint .venv-$*/constraints.txt --upgrade \
		"$$($(PYTHON) -m tools.versions --torch $*)" $$($(LISTED) data eval mlflow test)
	touch $@

# Transformer Engine, and einops, which it imports, without its compiled extension, which tests/gpu_path stands in for. Not in .venv: only processes that
# emulate are to find it.
.te/.ready: pyproject.toml | $(READY)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps --constraint constraints.txt --upgrade --target .te \
		transformer-engine==$(TE_VERSION) transformer-engine-cu13==$(TE_VERSION) einops
	touch $@

# --no-build-isolation: its set-up asks for the torch that is installed. cccl's headers are not among torch's.
.te-extension/.ready: pyproject.toml | $(READY)
	$(PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-binary :all: \
		--dest .te-extension transformer-engine-torch==$(TE_VERSION)
	tar -xzf .te-extension/transformer_engine_torch-$(TE_VERSION).tar.gz -C .te-extension
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps --constraint constraints.txt --upgrade \
		--target .te-extension nvidia-cuda-cccl
	touch $@

.venv-docs/.ready: pyproject.toml constraints.txt
	@test -n "$(BASE_PYTHON)" || { echo "Triplane needs Python 3.12 (python3.12 on the PATH, or pyenv's 3.12): none was found." >&2; exit 1; }
	$(BASE_PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		$$($(BASE_PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	touch $@

# Nothing of the container's is replaced: every version that it has (as far as it is a PEP 440 one) is a constraint.
# `pip list`, since `pip freeze` names what was installed from a local wheel (NVIDIA's torch) by file, not by version.
PIP_INSTALL := python3 -m pip install --quiet --disable-pip-version-check
MANAGED := import os, pathlib, sys, sysconfig; \
	marked = pathlib.Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED").exists() and sys.prefix == sys.base_prefix; \
	sys.exit(1 if marked and not os.environ.get("PIP_BREAK_SYSTEM_PACKAGES") else 0)
REFUSED := The image reserves its Python packages for its own package manager (EXTERNALLY-MANAGED), and some that Triplane needs are missing: python3 -m tools.versions names them. To install them beside the image's, which stay as they are: PIP_BREAK_SYSTEM_PACKAGES=1 make ... VENV=system
PEP440 := ([0-9]+!)?[0-9]+(\.[0-9]+)*((a|b|rc)[0-9]+)?(\.post[0-9]+)?(\.dev[0-9]+)?(\+[a-z0-9.]+)?
# What is there already is not asked for: neither a registry nor the right to install is needed then.
.venv-system-checked: pyproject.toml
	@set -e -o pipefail; if python3 -m tools.versions --extras data test > /dev/null 2>&1; then exit 0; fi; \
	python3 -c '$(MANAGED)' || { echo "$(REFUSED)" >&2; exit 1; }; \
	installed=$$(mktemp); trap 'rm -f "$$installed"' EXIT; \
	python3 -m pip list --disable-pip-version-check --format=freeze | grep -iE '^[a-z0-9._-]+==$(PEP440)$$' > "$$installed"; \
	$(PIP_INSTALL) --constraint "$$installed" --no-deps $$($(LISTED) data test | grep ^megatron-core); \
	$(PIP_INSTALL) --constraint "$$installed" $$($(LISTED) data test | grep -v ^megatron-core)
	python3 -m tools.versions
	touch $@

clean:
	rm -rf .te .te-extension .venv .venv-oldest .venv-newest .venv-docs .venv-system-checked build *.egg-info .pytest_cache .mypy_cache .ruff_cache
