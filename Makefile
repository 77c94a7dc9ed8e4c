# Each target does its own set-up; Python 3.11 or newer on the PATH is all that it needs.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin

.PHONY: demo test faults lint clean

demo: .venv/installed
	$(BIN)/fulgurite fit --config rocp/cpu
	$(BIN)/fulgurite test --config rocp/cpu --ckpt_path last

test: .venv/installed-dev
	$(BIN)/python -m pytest

faults: .venv/installed-dev
	$(BIN)/python -m pytest -m fault

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p fulgurite

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache

.venv/created:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Fulgurite needs Python 3.11 or newer, this is " + sys.version)'
	$(PYTHON) -m venv .venv
	mkdir -p .venv/src && ln -sfn ../.. .venv/src/fulgurite
	touch $@

.venv/installed: .venv/created pyproject.toml
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

.venv/installed-dev: .venv/created pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@ .venv/installed
