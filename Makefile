# Every target sets up what it needs: Python >= 3.11 and make are all a fresh clone wants.
PYTHON ?= python3
PY := .venv/bin/python
STAMP := .venv/.installed

.PHONY: setup demo test quick check docs format bench bench-peers browser screenshots clean

setup: $(STAMP)

# torch first and pinned: anything else would pull its newest build with gigabytes beside it.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "shardmill needs Python >= 3.11, found %s: make PYTHON=python3.11 ..." % sys.version.split()[0])'
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --constraint constraints.txt torch
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[all,dev,docs]'
	@touch $(STAMP)

demo: $(STAMP)
	$(PY) examples/demo.py

# Each worker gets a part, so that few fixtures are built twice, and then takes from the others. Three
# on two cores: a quarter of the time is spent waiting for processes that were killed or started.
PYTEST := $(PY) -m pytest -n 3 --dist worksteal

test: $(STAMP)
	$(PYTEST)

quick: $(STAMP)
	$(PYTEST) -m 'not slow'

check: $(STAMP) docs
	@! git grep -nE '^(<{7} |>{7} |={7}$$)' || { echo 'merge conflict markers: settle the lines above' >&2; false; }
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

# Every warning is an error: a link that leads nowhere, a page that is in no menu.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict

format: $(STAMP)
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

bench: $(STAMP)
	$(PY) benchmarks/gather.py
	$(PY) benchmarks/sampling.py
	$(PY) benchmarks/pack.py
	$(PY) benchmarks/chat.py
	$(PY) benchmarks/chat_fit.py
	$(PY) benchmarks/build.py
	$(PY) benchmarks/read.py
	$(PY) benchmarks/read.py --scale

# Chromium and its driver, for the tests of the inspector's page. Nothing is done where they are.
browser:
	@test -x /usr/bin/chromium -a -x /usr/bin/chromedriver || .ci/install-browser

screenshots: $(STAMP) browser
	$(PY) -m tests.inspect.browser.screenshots

# A separate venv: these bring hundreds of packages. A peer that cannot be installed is left out.
PEERS := .venv-peers/bin/python
.venv-peers/.installed: pyproject.toml constraints.txt benchmarks/peers.txt
	$(PYTHON) -m venv .venv-peers
	$(PEERS) -m pip install --quiet --constraint constraints.txt torch
	$(PEERS) -m pip install --quiet --constraint constraints.txt --editable '.[hf,fast,hub]'
	@for peer in $$(grep -v '^#' benchmarks/peers.txt); do \
	  $(PEERS) -m pip install --quiet "$$peer" 'torch==$(shell sed -n 's/^torch==//p' constraints.txt)' \
	  || echo "left out: $$peer cannot be installed here"; done
	@touch $@

bench-peers: .venv-peers/.installed
	$(PEERS) benchmarks/read.py
	$(PEERS) benchmarks/pack.py
	$(PEERS) benchmarks/build_peers.py
	$(PEERS) benchmarks/chat_store.py

clean:
	rm -rf .venv .venv-peers demo site tutorial .pytest_cache .mypy_cache .ruff_cache
