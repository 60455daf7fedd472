# Two commands, set-up included:  make reproduce   make test
#
# make            set up .venv from envs/requirements.lock
# make reproduce  capture, measure, predict, compare: ends with results/report/index.html
# make resume     unlock what a killed run left (kill -9, no memory, no power), then go on with it
# make campaign MINUTES=15   capture and time operations on the GPU of this machine, the most valuable first
# make test       the tests, without the slow tier; with it: make test TIER=
# make lint       every check of form
# make site       the documents as a site: build/site/index.html
# make pictures   draw docs/figures of README and the tour again; needs chromium
# make notebooks  execute docs/notebooks in place; one of them retrieves public data (docs/data.md)
# make docs       write config/README.md and workflow/schemas/ again from their sources
# make bench     measure speeds and write docs/bench.md
# make publish   carry results/ of a finished run into README.md, docs/ and the shipped example
# make release VERSION=0.2.0 [URL=https://...]   write a version (and where the project lies) into all that names it
# make clean      remove results and caches; .venv stays
#
# PYTHON=/path/to/python3 chooses the interpreter, ARGS="--cores 8" goes to Snakemake.

.DEFAULT_GOAL := setup
.PHONY: setup reproduce resume campaign test lint docs site pictures notebooks bench publish release clean

# Compiled modules are kept: hundreds of processes start, and each would compile the library again.
export PYTHONDONTWRITEBYTECODE :=

BIN := .venv/bin
TIER := not slow
MINUTES := 15
STAMP := .venv/.stamp
RESULTS := $(or $(shell sed -n 's/^results:[[:space:]]*\([^[:space:]\#]*\).*/\1/p' config/config.yaml),results)
PYTHONS := $(PYTHON) python3.11 python3.12 python3.13 python3.14 python3 python

setup: $(STAMP)

$(STAMP): envs/requirements.lock pyproject.toml
	@for python in $(PYTHONS); do \
	  if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	  then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "trioflow needs Python 3.11 or newer with venv; tried: $(PYTHONS). Set PYTHON=/path/to/python3." >&2; \
	  exit 2; \
	fi; \
	echo "setting up .venv with $$($$found --version)"; \
	$$found -m venv .venv
	$(BIN)/python -m pip install --quiet --requirement envs/requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

reproduce: resume
	@$(MAKE) --no-print-directory $(RESULTS)/report/snakemake.html
	@echo "report: $(RESULTS)/report/index.html; Snakemake's own: $(RESULTS)/report/snakemake.html"

resume: $(STAMP)
	@$(BIN)/python workflow/unlock_stale.py
	$(BIN)/snakemake --quiet reason $(ARGS)

# Snakemake's report shows what the workflow made: it is as old as the page that ends it.
$(RESULTS)/report/snakemake.html: $(RESULTS)/report/index.html workflow/report/workflow.rst
	$(BIN)/snakemake --report $@

# Snakemake starts no further job after SIGTERM, and waits for the one that runs. What failed stands in the table of items.
campaign: $(STAMP)
	@$(BIN)/python workflow/unlock_stale.py
	-timeout --foreground --signal=TERM $$(( 54 * $(MINUTES) )) \
	  $(BIN)/snakemake --quiet reason --keep-going campaign $(ARGS)
	$(BIN)/snakemake --quiet reason --keep-going --cores all --forcerun collect_campaign -- $(RESULTS)/campaign/items.parquet

test: $(STAMP)
	$(BIN)/python -m pytest -m "$(TIER)" --numprocesses auto --dist worksteal

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/snakefmt --check Snakefile rules
	$(BIN)/snakemake --lint

docs: $(STAMP)
	$(BIN)/python docs/build_reference.py

build/%-tools/.stamp: envs/%.lock $(STAMP)
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --no-deps --target $(@D) --requirement $<
	@touch $@

site: build/site-tools/.stamp
	PYTHONPATH=build/site-tools $(BIN)/python -m mkdocs build --quiet --strict --site-dir build/site

pictures: $(STAMP)
	$(BIN)/python docs/draw_pictures.py

notebooks: build/notebooks-tools/.stamp
	PYTHONPATH=$(CURDIR)/build/notebooks-tools $(BIN)/python docs/run_notebooks.py

bench: $(STAMP)
	$(BIN)/python bench/run_bench.py

publish: $(STAMP)
	$(BIN)/python docs/publish_results.py

release: $(STAMP)
	$(BIN)/python docs/release.py "$(VERSION)" $(URL)

clean:
	rm -rf $(RESULTS) .snakemake .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
