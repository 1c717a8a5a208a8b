# Everything a user or a contributor runs. Installation goes through pip with
# constraints.txt, so that every machine tests the same versions.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-kube test-prometheus lint proto clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# make demo ARGS='--seed 3'
demo: $(STAMP)
	$(BIN)/outlast demo $(ARGS)

test: $(STAMP) lint
	$(BIN)/pytest -n 3 --dist loadfile --ignore tests/prometheus/test_real.py

# Against kube-apiserver and etcd, which are built once per machine (about 6 minutes).
test-kube: $(STAMP)
	tests/kube/apiserver.sh
	$(BIN)/pytest tests/kube --kube=real

# Against a real Prometheus and Alertmanager, which it installs on Debian as root.
test-prometheus: $(STAMP)
	tests/prometheus/install.sh
	$(BIN)/pytest tests/prometheus

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

proto: $(STAMP)
	$(BIN)/python -m tests.protostubs .

bench-%: $(STAMP)
	$(BIN)/python -m bench.$* $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache runs
