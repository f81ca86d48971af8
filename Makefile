# Everything runs in a virtual environment of its own, made on first use.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo demo-cord demo-kather test test-all test-oldest stress lint types docs format clean

demo: $(STAMP)
	$(BIN)/tesla-med demo --task prostate --out demo

demo-cord: $(STAMP)
	$(BIN)/tesla-med demo --task spinal_cord --out demo-cord

demo-kather: $(STAMP)
	$(BIN)/tesla-med demo --task kather --out demo-kather

# Every behaviour, in a few minutes; test-all adds the slow rest.
test: $(STAMP)
	$(BIN)/python -m pytest -q -n auto -m "not slow"

test-all: $(STAMP)
	$(BIN)/python -m pytest -q -n auto -m slow

# The same with the lowest versions that pyproject.toml allows, in a virtual environment of their own.
OLDEST ?= .venv-oldest
test-oldest:
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python tests/oldest.py > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet -c $(OLDEST)/constraints.txt -e ".[dev]"
	$(OLDEST)/bin/python -m pytest -q -n auto -m "not slow"

stress: $(STAMP)
	TESLA_MED_EXAMPLES=1000 $(BIN)/python -m pytest -q -n auto tests/test_properties.py
	$(BIN)/python benchmarks/faults.py
	$(BIN)/python benchmarks/memory.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(STAMP)
	$(BIN)/mypy

# The site of the documentation, strict: no page left out, no link or anchor that leads nowhere.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) $(OLDEST) demo demo-cord demo-kather runs site build dist .pytest_cache .mypy_cache .ruff_cache
