# Needs Python 3.11 and make; everything else is installed into .venv.
PYTHON ?= python3
BIN := .venv/bin
PROCESSES ?= 2
STAMP := .venv/.installed

.PHONY: demo test lint types docs bench experiments versions clean

demo: $(STAMP)
	$(BIN)/python -m remat demo

# Runs PROCESSES processes with one numeric thread each; the tests of one file stay in one process.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(PROCESSES) --dist loadfile

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# Builds the documentation as a site in build/site; a broken link or reference is an error.
docs: $(STAMP)
	DISABLE_MKDOCS_2_WARNING=true NO_MKDOCS_2_WARNING=1 $(BIN)/properdocs build --quiet -f mkdocs.yml

bench: $(STAMP)
	$(BIN)/python -m experiments.bench

# Makes the field's figures and tables that two cores can make, in under 45 minutes.
# To make some of them: python -m experiments.all --only NAME.
experiments: $(STAMP)
	$(BIN)/python -m experiments.all

# Runs part of the tests on every supported PyTorch, each in an environment under .versions: several GB and minutes each.
versions: $(STAMP)
	$(BIN)/python -m experiments.versions

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage demo

# The stamp file keeps a second run from installing again. constraints.txt pins every version, above all torch's.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,docs]'
	touch $@
