# SpecLA. Everything starts from nothing: `make demo`, `make test`. `make help` lists the rest.

VENV   := .venv
BIN    := $(VENV)/bin
# The first Python of 3.11 or later; `make PYTHON=/path/to/python3.12 ...` chooses another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

# What is installed is stamped with what it was installed from, so a second run costs nothing
# and a changed pyproject.toml (or a moved folder) installs anew.
STAMP := $(shell { cat pyproject.toml; pwd; } | cksum | cut -d' ' -f1)
RUN   := $(VENV)/.run-$(STAMP)
DEV   := $(VENV)/.dev-$(STAMP)

SANITIZER    ?= compute-sanitizer
AS_INSTALLED := $(PYTHON) tools/link_packages.py && PYTHONPATH=build/types$${PYTHONPATH:+:$$PYTHONPATH}

.DEFAULT_GOAL := help
.PHONY: help demo test test-gpu sanitize-gpu bench lint format types protos protos-check buf-lint buf-breaking wheel \
	wheel-check compose-check module-map readme-figures readme-check hooks install install-dev clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# ---------------------------------------------------------------- install

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "SpecLA needs Python 3.11 or later; none was found on the PATH." >&2; exit 1; }
	@echo "==> making $(VENV) with $(PYTHON) ($$($(PYTHON) --version))"
	$(PYTHON) -m venv $(VENV)

$(RUN): | $(BIN)/python
	@echo "==> installing SpecLA to run (torch is the big one)"
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile -e '.[verifier]'
	@rm -f $(VENV)/.run-* && touch $@

$(DEV): | $(BIN)/python
	@echo "==> installing SpecLA to develop (torch is the big one)"
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile -e '.[dev]'
	@rm -f $(VENV)/.dev-* $(VENV)/.run-* && touch $@ $(RUN)

install: $(RUN) ## what running needs, into .venv
install-dev: $(DEV) ## what developing needs, into .venv

# ---------------------------------------------------------------- run

demo: $(RUN) ## plain and speculative decoding of the same prompts: same text, sooner
	@$(BIN)/specla demo

bench: $(RUN) ## list the benchmarks
	@$(BIN)/specla bench --help

# ---------------------------------------------------------------- test

test: $(DEV) ## all tests that need no GPU
	$(BIN)/pytest -m "not gpu"

# With PYTEST given, tests run in the environment at hand, where SpecLA need not be installed: the folders are found
# under their import names through build/types. What takes times comes last then, by one process.
test-gpu: $(if $(PYTEST),,$(DEV)) ## tests on a CUDA device; PYTEST="pytest -n 8" takes what is installed
	$(if $(PYTEST),$(AS_INSTALLED) $(PYTEST),$(BIN)/pytest) -m "gpu or any_device"
	$(if $(filter -n%,$(PYTEST)),$(AS_INSTALLED) $(PYTEST) -n 0 -m gpu tests/kernels/gpu/test_selector.py)

# memcheck sees addresses outside of what was allocated, racecheck races over shared memory. Races over global memory (the
# tile between groups, kept states) are a matter of the tests that compare bits.
sanitize-gpu: $(if $(PYTEST),,$(DEV)) ## compute-sanitizer on small launches of all kernels; PYTEST=... as above
	for tool in "memcheck --report-api-errors no" racecheck; do \
		$(if $(PYTEST),$(AS_INSTALLED)) PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZER) --tool $$tool \
			--error-exitcode 1 --target-processes application-only \
			$(if $(PYTEST),$(PYTHON),$(BIN)/python) tools/sanitize_kernels.py \
			$$(test "$$tool" != racecheck || echo --no-specialized) || exit 1; \
	done

lint: $(DEV) ## ruff: rules and layout
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(DEV) ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(DEV) ## mypy --strict over all packages and the house
	$(BIN)/python tools/link_packages.py
	$(BIN)/mypy -p specla
	$(BIN)/mypy tools tests/house tests/deploy tests/conftest.py

protos: $(DEV) ## generate protos/specla/v1/*_pb2*
	$(BIN)/python tools/generate_protos.py

protos-check: $(DEV) ## prove that the generated code is current
	$(BIN)/python tools/generate_protos.py --check

node_modules/.package-lock.json: package.json
	npm install --ignore-scripts --no-package-lock --no-audit --no-fund
	@touch $@

buf-lint: node_modules/.package-lock.json ## Buf's STANDARD lint of the protocol
	node_modules/.bin/buf lint

buf-breaking: node_modules/.package-lock.json ## prove that no field of the released protocol changed
	node_modules/.bin/buf breaking --against protos/released.binpb

# At a release: node_modules/.bin/buf build --exclude-source-info -o protos/released.binpb

wheel: $(DEV) ## build dist/specla-*.whl
	$(BIN)/python -m pip wheel --disable-pip-version-check --no-deps --no-build-isolation -w dist .

wheel-check: $(DEV) ## prove that wheel and editable install hold the same modules
	$(BIN)/pytest tests/house/test_packaging.py

compose-check: ## have docker-compose read deploy/compose.yaml
	docker-compose -f deploy/compose.yaml --env-file deploy/.env.example config --quiet

module-map: $(DEV) ## list the modules in docs/architecture.md
	$(BIN)/python tools/module_map.py

readme-figures: $(DEV) ## write the figures of benchmarks/results/*.json into README.md
	$(BIN)/python tools/readme_figures.py

readme-check: $(DEV) ## prove that README.md shows the figures of benchmarks/results/*.json
	$(BIN)/python tools/readme_figures.py --check

hooks: $(DEV) ## have git run the quick checks before each commit
	$(BIN)/pre-commit install

clean: ## remove what the commands above made, .venv included
	rm -rf $(VENV) build dist node_modules *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f kernels/__pycache__/*.nbi kernels/__pycache__/*.nbc
