# Everything runs in .venv; nothing outside this folder is touched. Paths are relative, so that the folder's own may
# hold spaces. `make plan PYTHON=python3.12` picks another interpreter.
PYTHON ?= python3
PLAN_ARGS ?= --target-tps 900k
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check
FARM := .typecheck/rackplan

.PHONY: plan test lint clean

plan: $(VENV)/.installed
	$(VENV)/bin/plan $(PLAN_ARGS)

test: $(VENV)/.installed-test
	$(PY) -m pytest

# The five packages stand at the top and install as rackplan.*; mypy wants to see them under one folder.
lint: $(VENV)/.installed-lint
	@mkdir -p $(FARM)
	@for p in engine simulator calibration tuner cli; do ln -sfn ../../$$p $(FARM)/$$p; done
	@for f in __init__.py py.typed; do ln -sf ../../rackplan/$$f $(FARM)/$$f; done
	$(PY) -m ruff check .
	MYPYPATH=.typecheck $(PY) -m mypy -p rackplan

clean:
	rm -rf $(VENV) .typecheck out build dist rackplan.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
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

$(PY):
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11 or newer (Debian: apt-get install python3 python3-venv)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$$($(PYTHON) --version): rackplan needs 3.11 or newer; install it and say make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "$(PYTHON) has no venv: apt-get install python3-venv" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
