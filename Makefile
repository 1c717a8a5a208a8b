# Everything a user or a contributor runs. Installation goes through pip with
# constraints.txt, so that every machine tests the same versions. Tests read one file of timm,
# which would bring torchvision along, and compare with one of megatron-core.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Tests start hundreds of processes and pytest rewrites hundreds of files: compiled once, not by
# each of them, whatever the image that this runs in sets.
unexport PYTHONDONTWRITEBYTECODE

# Of what is installed, a third is ever imported, and compiled then; these are imported by nearly
# every process of the tests, many at once.
COMPILED = $(VENV)/lib/python*/site-packages/torch $(VENV)/lib/python*/site-packages/numpy

.PHONY: demo test test-crash test-gpu test-seeds test-properties test-fuzz test-kube kube-server test-prometheus test-postgres test-stores \
	test-foreign test-web screenshots chaos chaos-full lint rewritten proto clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --no-deps timm megatron-core
	$(BIN)/python -m compileall -q -j 0 -x /testing/ $(COMPILED)
	touch $@

# make demo ARGS='--seed 3'
demo: $(STAMP)
	$(BIN)/outlast demo $(ARGS)

# Most tests wait for processes, so there are more at once than cores; tests/conftest.py says
# which files come first. One has the kernel kill a process for want of memory, which the agents
# of all others would tell.
ALONE := tests/agent/test_real_oom.py
# These have a browser, or a program that opens traces: `make test-web`.
IN_BROWSER := $(addprefix tests/web/, test_browser.py test_editor.py test_perfetto.py test_trends_page.py test_held_out_page.py \
	test_gestures.py test_curve_marks.py test_checkpoints_page.py test_attempts_page.py \
	test_live_page.py test_cube.py test_heat_map_page.py test_links.py test_logs_page.py)
test: $(STAMP)
	$(MAKE) --jobs 2 lint rewritten
	$(BIN)/pytest -rs -n 3 --dist loadfile --no-loadscope-reorder \
		--ignore tests/prometheus/test_real.py --ignore tests/stores \
		--ignore tests/crash/test_cluster.py $(addprefix --ignore ,$(IN_BROWSER) $(ALONE)) tests
	$(BIN)/pytest -rs $(ALONE)

# One training on real nodes loses a process of every kind; `make test` kills at every named point.
test-crash: $(STAMP)
	$(BIN)/pytest tests/crash/test_cluster.py

# What only a GPU can answer; `make test` skips it where there is none.
test-gpu: $(STAMP)
	$(BIN)/pytest -rs tests/gpu

# A thousand seeds of the simulated world, in two processes; `make test` runs 200 of them.
test-seeds: $(STAMP)
	$(BIN)/python -m controller.sim.run --seed 0 --count 1000 --processes 2 --quiet \
		--output tests/sim/results/seeds.json

# Properties with other examples than those of `make test`, and more where a test sets no number.
test-properties: $(STAMP)
	HYPOTHESIS_PROFILE=random $(BIN)/pytest -n 2 -m hypothesis tests

# A hundred thousand strange inputs on everything that listens; `make test` sends 300. About half an
# hour; FUZZ_SEED=N sends others.
FUZZ_INPUTS ?= 100000
test-fuzz: $(STAMP)
	FUZZ_INPUTS=$(FUZZ_INPUTS) $(BIN)/pytest -n 2 --timeout 3600 tests/fuzz

# Against kube-apiserver and etcd, which are built once per machine (about 6 minutes).
test-kube: $(STAMP) kube-server
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder --kube=real tests/kube

kube-server:
	tests/kube/apiserver.sh

# Against a real Prometheus and Alertmanager, which it installs on Debian as root.
test-prometheus: $(STAMP)
	tests/prometheus/install.sh
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder tests/prometheus

# The journal in a real PostgreSQL, which it installs on Debian as root.
test-postgres: $(STAMP)
	tests/postgres/install.sh
	$(BIN)/pytest tests/postgres

# The web page in Chromium, which it installs on Debian as root.
test-web: $(STAMP)
	tests/web/install.sh $(BIN)/pip
	$(BIN)/pytest -n 2 --dist loadfile $(IN_BROWSER)

# Every page in two sizes and both themes, in build/pictures, and those of the docs in docs/pictures;
# make screenshots ARGS=FOLDER: all of them there, and none in docs/
screenshots: $(STAMP)
	tests/web/install.sh $(BIN)/pip
	$(BIN)/python -m tests.web.screenshots $(ARGS)

# A script in an environment with another Python and another torch, which it installs once (7 GB).
# It needs numpy no more than a user's.
FOREIGN_PYTHON ?= python3.10
FOREIGN_TORCH ?= 2.8.0
FOREIGN := .venv-foreign
test-foreign: $(STAMP)
	test -x $(FOREIGN)/bin/python || $(FOREIGN_PYTHON) -m venv $(FOREIGN)
	$(FOREIGN)/bin/python -m pip install --quiet torch==$(FOREIGN_TORCH)
	OUTLAST_FOREIGN_PYTHON=$(CURDIR)/$(FOREIGN)/bin/python $(BIN)/pytest tests/e2e/test_foreign.py

# Checkpoints on real stores, S3 and HDFS, with faults; they are fetched once per machine (270 MB).
test-stores: $(STAMP)
	tests/stores/servers.sh $(BIN)/python
	$(BIN)/pytest -n 3 --dist loadfile tests/stores

# Faults at every moment in real processes, some of the combinations (another SEED takes
# others; CHAOS=--brief takes fewer), and beside them training in which nothing goes wrong.
SEED ?= 1
chaos: $(STAMP)
	$(BIN)/python -m tests.chaos --seed $(SEED) --healthy-s 300 $(CHAOS) $(ARGS)

# All of them take hours; when it is called again, it goes on with those that have not passed.
chaos-full: $(STAMP)
	$(BIN)/python -m tests.chaos --full --healthy-s 3600 --output tests/chaos/results/full.json

# The tests as pytest compiles them, once: beside mypy, which takes one core, and not by each of its
# processes.
rewritten: $(STAMP)
	-$(BIN)/pytest --collect-only -qq tests >/dev/null

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

proto: $(STAMP)
	$(BIN)/python -m tests.protostubs .

# One of its cases is in Chromium, as are the tests of the page.
bench-observe: $(STAMP)
	tests/web/install.sh $(BIN)/pip
	$(BIN)/python -m bench.observe $(ARGS)

bench-%: $(STAMP)
	$(BIN)/python -m bench.$* $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache runs
