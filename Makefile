# The two commands: `make demo` and `make test`; each sets up `.venv` first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo test slow dist bare lint house release notebooks docs clean

setup: .venv/.installed-runtime

.venv/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "jaxdp needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	@touch $@

.venv/.installed-runtime: .venv/.created pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[all]'
	@touch $@

.venv/.installed-dev: .venv/.created pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@ .venv/.installed-runtime

demo: setup
	$(BIN)/jaxdp train --dataset digits

test: .venv/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not slow'

slow: .venv/.installed-dev  # the few tests that `make test` leaves out
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow

# What is uploaded, both distributions, built twice: the same sources and hatchling give the same bytes.
dist: .venv/.installed-dev
	rm -rf dist build/again
	@mkdir -p build
	@for to in dist build/again; do \
	  $(BIN)/python distributions/split.py build/split || exit 1; \
	  for name in accounting privacy; do \
	    SOURCE_DATE_EPOCH=$${SOURCE_DATE_EPOCH:-$$(git log -1 --format=%ct)} \
	      $(BIN)/pyproject-build --no-isolation --outdir $$to build/split/$$name >build/said 2>&1 \
	      || { cat build/said >&2; exit 1; }; \
	  done; \
	done
	@cd dist && for file in *; do cmp $$file ../build/again/$$file || exit 1; done
	$(BIN)/twine check --strict dist/*
	@$(BIN)/python -m pip hash dist/*

# Both wheels in an environment of their own, then the accountant's alone in another; what is imported
# is the wheel's, for the programs begin in an empty folder and see (-I) no other. At last both are
# removed, installed and upgraded in all orders.
bare: dist
	rm -rf build/bare build/alone
	$(PYTHON) -m venv build/bare
	$(PYTHON) -m venv build/alone
	mkdir build/bare/empty
	build/bare/bin/python -m pip install --quiet dist/*.whl
	build/alone/bin/python -m pip install --quiet dist/jaxdp_accounting-*.whl
	cd build/bare/empty && ../bin/python -I ../../../tests/bare.py
	cd build/bare/empty && ../../alone/bin/python -I ../../../tests/alone.py
	@! build/bare/bin/jaxdp 2>build/said
	@grep -q "pip install 'jaxdp-privacy\[cli\]'" build/said
	@du -sm build/bare/lib/python3*/site-packages build/alone/lib/python3*/site-packages
	$(BIN)/python tests/orders.py build/bare/bin/python

lint: .venv/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m benchmarks.lint
	$(BIN)/mypy
	$(BIN)/mypy --platform win32
	$(BIN)/mypy --platform darwin

house: .venv/.installed-dev  # how much of the package a reader must open, against the record
	$(BIN)/python -m benchmarks.house

release: .venv/.installed-dev  # what is committed agrees: pages, results, examples, notebooks
	$(BIN)/python -m benchmarks.release

notebooks: .venv/.installed-dev  # runs them all and stores what they show, some minutes
	$(BIN)/python notebooks/execute.py

docs: .venv/.created
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	$(BIN)/mkdocs build --strict --quiet
	@echo 'build/site/index.html; with its search: $(BIN)/python -m http.server --directory build/site'

clean:  # build/compiled holds programs that tests compiled
	rm -rf .venv build dist *.egg-info
