# make demo   install, run the demo study, print its table and where the report is
# make test   install, then format, lint, types, import contracts and all tests
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed

.PHONY: demo test setup lint drill clean

demo: setup
	$(BIN)/assay run examples/hopper.yaml

test: lint
	$(BIN)/pytest -q

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "assay needs Python 3.11 or newer: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,envs]'
	touch $(STAMP)

lint: setup
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

drill: setup
	$(BIN)/pytest -q -m drill

clean:
	rm -rf .venv .assay build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
