# quickstart | examples | test | test-fast | lint | format | protos | check-protos | page | docs | check-docs | bench | bench-learning | bench-trl |
# chaos | soak | clusters | images | gpu | mutants | sbom | audit | clean: each sets up what it needs, once.
PYTHON ?= python3.11
# For NeMo Gym, whose tests are skipped where there is none.
PYTHON312 ?= $(shell python3.12 -c "import sys; print(sys.executable)" 2>/dev/null)
VENV   := .venv
BIN    := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PROTOS := .venv-protos
TRL    := .venv-trl
VERIFIERS := .venv-verifiers
CODEX  := .venv-codex
FRAMEWORKS := .venv-frameworks
INSPECT := .venv-inspect
NEMO_GYM := .venv-nemo-gym
SUPPLY := .venv-supply
DOCS   := .venv-docs
# The small model of the quickstart, the examples and the benches: prepared once for all that this user runs.
MODEL  := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/headrace/SmolLM2-135M-Instruct
NODE   := protos/typescript
PIP     = $(BIN)/python -m pip install --disable-pip-version-check --no-deps

.PHONY: quickstart examples test test-fast lint format page protos check-protos docs check-docs bench bench-trl bench-learning chaos mutants images gpu sbom audit soak clusters clean
.DELETE_ON_ERROR:

quickstart: $(STAMPS)/headrace $(STAMPS)/quickstart
	@$(BIN)/headrace quickstart

# Every example as its README says, a few steps long (STEPS), and every tutorial; EXAMPLES="countdown search" runs fewer. `make test` plays their
# functions with an engine that stands in for SGLang.
STEPS ?= 3
examples: $(STAMPS)/headrace $(STAMPS)/dev $(MODEL)/model.safetensors $(PROTOS)/.stamp $(VERIFIERS)/.stamp $(INSPECT)/.stamp $(CODEX)/.stamp $(FRAMEWORKS)/.stamp $(if $(PYTHON312),$(NEMO_GYM)/.stamp)
	@$(BIN)/python -m tools.examples --steps $(STEPS) $(EXAMPLES)
	@$(BIN)/python -m tests.support.tutorials all
	@HEADRACE_VERIFIERS_PYTHON=$(VERIFIERS)/bin/python HEADRACE_INSPECT_PYTHON=$(INSPECT)/bin/python \
		$(BIN)/python -m pytest tests/contract/test_verifiers.py tests/contract/test_inspect_eval.py
	@HEADRACE_NEMO_GYM_PYTHON=$(if $(PYTHON312),$(NEMO_GYM)/bin/python) $(BIN)/python -m pytest -rs tests/contract/test_nemo_gym.py
	@HEADRACE_FRAMEWORKS_PYTHON=$(FRAMEWORKS)/bin/python $(BIN)/python -m pytest tests/contract/test_frameworks.py
	@HEADRACE_CODEX=$(CODEX)/node_modules/.bin/codex unshare --net --map-root-user \
		sh -c 'ip link set lo up && exec $(BIN)/python -m pytest tests/contract/test_codex.py'

# All of it, or `make test T=tests/unit/wire` (a folder, a file, one test) without the lint.
# Two files of tests at a time: most of them wait for processes that they have started.
ifdef T
test: $(STAMPS)/headrace $(STAMPS)/dev
	@$(BIN)/python -m pytest $(T)
else
test: lint $(STAMPS)/node $(STAMPS)/extras $(DOCS)/.stamp $(MODEL)/model.safetensors
	@$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder
endif

# For the loop of work: the unit tests but those that start ranks or engines.
test-fast: lint $(STAMPS)/extras
	@$(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m "not ranks and not engine and not e2e" tests/unit

lint: $(STAMPS)/headrace $(STAMPS)/dev check-protos
	@echo "── ruff";         $(BIN)/ruff check . && $(BIN)/ruff format --check .
	@echo "── mypy";         $(BIN)/mypy
	@echo "── import-linter"; $(BIN)/lint-imports --no-cache
	@echo "── flags";        $(BIN)/python -m tools.flags
	@echo "── roles";        $(BIN)/python -m tools.roles
	@echo "── families";     $(BIN)/python -m tools.families
	@echo "── sizes";        $(BIN)/python -m tools.sizes
	@echo "── page";         tools/check_page.sh

format: $(STAMPS)/dev
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

protos: $(PROTOS)/.stamp
	@protos/generate.sh $(PROTOS)/bin/python

page: $(STAMPS)/node
	@cd web && npm run --silent build

check-protos: $(PROTOS)/.stamp
	@echo "── protos";       tools/check_protos.sh $(PROTOS)/bin

# The site of docs/ in site/: site/index.html opens as a file, search included.
docs: $(STAMPS)/headrace $(STAMPS)/dev $(DOCS)/.stamp
	@$(BIN)/python -m tools.site $(DOCS)/bin/zensical

# Every page of it in a real browser: wide, narrow and dark. `make test` opens one page of each kind.
check-docs: $(STAMPS)/headrace $(STAMPS)/dev $(STAMPS)/node $(DOCS)/.stamp
	@HEADRACE_SITE_PAGES=all $(BIN)/python -m pytest tests/contract/test_site.py

bench: $(STAMPS)/headrace $(STAMPS)/dev $(MODEL)/model.safetensors
	@$(BIN)/python -m tests.bench.ledger_throughput
	@$(BIN)/python -m tests.bench.ledger.waiters
	@$(BIN)/python -m tests.bench.weights.publication
	@$(BIN)/python -m tests.bench.weights.adapters $(MODEL)
	@$(BIN)/python -m tests.bench.weights.delta $(MODEL)
	@$(BIN)/python -m tests.bench.training_step
	@$(BIN)/python -m tests.bench.training_step $(MODEL)
	@$(BIN)/python -m tests.bench.rewards
	@$(BIN)/python -m tests.bench.agents $(MODEL)
	@$(BIN)/python -m tests.bench.long_tails
	@$(BIN)/python -m tests.bench.first_step $(MODEL)

bench-learning: $(STAMPS)/headrace $(STAMPS)/dev
	@OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore $(BIN)/python -m tests.bench.learning

bench-trl: $(STAMPS)/headrace $(STAMPS)/dev $(TRL)/.stamp $(MODEL)/model.safetensors
	@$(BIN)/python -m tests.bench.against_trl $(TRL)/bin/python $(MODEL)

chaos: $(STAMPS)/headrace $(STAMPS)/dev $(STAMPS)/extras
	@HEADRACE_KILLS=100 HEADRACE_FAILPOINTS=all HEADRACE_RANK_KILLS=20 HEADRACE_DAMAGES=1000 HEADRACE_KILL_IMAGES=every HEADRACE_POWER_COMMANDS=1000 HEADRACE_POWER_CUTS=every \
		HEADRACE_AWAY_SECONDS=30 HEADRACE_SURVIVAL=all HEADRACE_COLOCATE_KILLS=all HEADRACE_WHOLE_RUNS=all \
		$(BIN)/python -m pytest tests/chaos --ignore tests/chaos/test_rolling_restart.py
	@HEADRACE_COLUMN_MIB=80 $(BIN)/python -m pytest -s tests/contract/buffer/test_columns.py::test_four_large_columns_pass_through_little_memory_and_a_kill
	@HEADRACE_ROLLING_ROUNDS=10 $(BIN)/python -m pytest -s tests/chaos/test_rolling_restart.py
	@HEADRACE_BOMBS=100 $(BIN)/python -m pytest -s tests/contract/test_slow_answers.py
	@HEADRACE_FUZZ=100000 $(BIN)/python -m pytest -s tests/hostile/test_fuzz.py
	@HEADRACE_HOSTILE=20000 $(BIN)/python -m pytest -s tests/hostile/test_surfaces.py
	@HEADRACE_OPTION_WORDS=all $(BIN)/python -m pytest tests/unit/job/test_every_option.py
	@HEADRACE_POSTGRES_CUTS=60 HEADRACE_POSTGRES_AWAY_SECONDS=30 $(BIN)/python -m pytest tests/hostile/test_postgres_away.py
	@HEADRACE_RESTORES=all $(BIN)/python -m pytest tests/contract/buffer/test_restore.py
	@HEADRACE_LEDGER_COMMANDS=2000 HEADRACE_LEDGER_SEEDS=15 $(BIN)/python -m pytest -s tests/hostile/test_ledger_reference.py
	@HEADRACE_WHOLE_RUNS=all $(BIN)/python -m pytest $$(grep -rl --include='test_*.py' tests.long_forms tests/unit tests/contract tests/e2e)
	@HEADRACE_UPGRADE=all $(BIN)/python -m pytest tests/upgrade
	@HEADRACE_HOSTS=all $(BIN)/python -m pytest -s tests/hosts
	@HEADRACE_CLUSTERS=all $(BIN)/python -m pytest -s tests/clusters
	@HEADRACE_SERVED_FAMILIES=all $(BIN)/python -m pytest -s tests/e2e/test_served_families.py

# A job for hours under traffic: SOAK_HOURS=4, or SOAK_MINUTES=5; the lines are drawn into SOAK_FOLDER.
SOAK_FOLDER ?= runs/soak-$(shell date +%Y%m%d-%H%M%S)
soak: $(STAMPS)/headrace $(STAMPS)/dev
	@$(BIN)/python -m tests.soak $(SOAK_FOLDER)

# A run as a job of a real Slurm (Debian: apt-get install slurm-wlm munge), and of a real Ray, of two nodes each.
clusters: $(STAMPS)/headrace $(STAMPS)/dev $(STAMPS)/extras
	@HEADRACE_CLUSTERS=all $(BIN)/python -m pytest -s tests/clusters

# The images of deploy/Containerfile, for CPUs, then a quickstart in one container and a run in four of them (`RUN=` leaves that out).
# IMAGES="buffer reward" builds fewer; ENGINE may be docker; BUILD_FLAGS and RUN_FLAGS are for its builds and its runs.
IMAGES ?= headrace buffer reward rollout trainer
ENGINE ?= podman
RUN ?= $(and $(filter headrace,$(IMAGES)),$(filter trainer,$(IMAGES)))
images: $(if $(RUN),$(STAMPS)/dev)
	@for target in $(IMAGES); do \
	    image=headrace-$$target; [ $$target != headrace ] || image=headrace; echo "── $$image"; \
	    $(ENGINE) build $(if $(findstring podman,$(ENGINE)),--format docker) --quiet $(BUILD_FLAGS) -f deploy/Containerfile \
	        --target $$target -t $$image . || exit 1; \
	    deploy/size.sh "$(ENGINE)" $$image || exit 1; done
	@test -z "$(RUN)" || HEADRACE_IMAGES=all HEADRACE_CONTAINER_ENGINE="$(ENGINE)" \
	    HEADRACE_RUN_FLAGS="$(RUN_FLAGS)" $(BIN)/python -m pytest -s tests/images

# On a machine with GPUs, by a Python that has the trainer's set and requirements/dev.txt (docs/placement.md, "GPUs"). The
# most telling part comes first, and none takes 8 minutes: `make gpu PART=speed`. WHEELS is a folder of tools.gpu_wheels.
GPU_PYTHON ?= /opt/trainer/bin/python
PART ?= placement parity speed memory lora publication families
gpu:
	@$(if $(WHEELS),$(GPU_PYTHON) -m pip install -q --no-index --no-deps --no-compile --upgrade --target $(WHEELS)/site $(WHEELS)/*.whl)
	@for part in $(PART); do \
	    echo "── $$part"; \
	    $(if $(WHEELS),PYTHONPATH=$(WHEELS)/site) $(GPU_PYTHON) -m pytest tests/gpu/test_$$part.py \
	        $$([ $$part != families ] || echo "--numprocesses 4") || failed="$$failed $$part"; \
	done; [ -z "$$failed" ] || { echo "failed:$$failed"; exit 1; }

mutants: $(STAMPS)/headrace $(STAMPS)/dev
	@$(BIN)/python -m tests.mutants.run

# What each service consists of (dist/sbom), and the flaws that are known of it; `audit` fails where nobody could be asked.
sbom: $(STAMPS)/dev $(SUPPLY)/.stamp
	@$(BIN)/python -m tools.sbom $(SUPPLY)/bin

audit: $(STAMPS)/dev $(SUPPLY)/.stamp
	@$(BIN)/python -m tools.audit $(SUPPLY)/bin

clean:
	rm -rf $(VENV) $(PROTOS) $(TRL) $(VERIFIERS) $(INSPECT) $(NEMO_GYM) $(CODEX) $(FRAMEWORKS) $(SUPPLY) $(DOCS) site web/node_modules $(NODE)/node_modules $(NODE)/api $(NODE)/dist $(NODE)/LICENSE

# ── what they need ──

$(BIN)/python:
	@echo "── a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS)

$(STAMPS)/cpu: requirements/cpu.txt requirements/cpu-no-deps.txt | $(BIN)/python
	@echo "── packages (once, some minutes): torch, megatron-core, SGLang and what they need"
	@mkdir -p $(STAMPS)
	@tools/install.sh $(PIP) -r requirements/cpu.txt -r requirements/cpu-no-deps.txt
	@touch $@

$(STAMPS)/headrace: pyproject.toml services/pyproject.toml $(STAMPS)/cpu
	@$(PIP) --quiet -e . -e ./services
	@touch $@

$(STAMPS)/dev: requirements/dev.txt | $(BIN)/python
	@echo "── packages for tests"
	@mkdir -p $(STAMPS)
	@$(PIP) --quiet -r requirements/dev.txt
	@touch $@

EXTRAS := $(patsubst %,requirements/%.txt,ray wandb ifbench trackio mlflow inspect mcp tinker trace)
$(STAMPS)/extras: $(EXTRAS) $(STAMPS)/cpu
	@echo "── packages of extras: ray, wandb, ifbench, trackio, mlflow, inspect, mcp, tinker, trace"
	@$(PIP) --quiet $(addprefix -r ,$(EXTRAS))
	@touch $@

$(STAMPS)/quickstart: requirements/quickstart.txt $(STAMPS)/cpu
	@echo "── the weights of SmolLM2-135M-Instruct"
	@tools/install.sh $(PIP) -r requirements/quickstart.txt
	@touch $@

$(STAMPS)/node: $(NODE)/package-lock.json web/package-lock.json | $(BIN)/python
	@mkdir -p $(STAMPS)
	@if command -v npm >/dev/null; then \
	    echo "── packages of the TypeScript client and of the page, and a browser for tests"; \
	    for folder in $(NODE) web; do (cd $$folder && npm ci --no-audit --no-fund --loglevel=error) || exit 1; done; fi
	@touch $@

$(PROTOS)/.stamp: requirements/protos.txt
	@echo "── the protobuf generator in $(PROTOS)"
	@$(PYTHON) -m venv $(PROTOS)
	@$(PROTOS)/bin/python -m pip install --disable-pip-version-check --quiet -r requirements/protos.txt
	@touch $@

$(SUPPLY)/.stamp: requirements/supply.txt
	@echo "── pip-audit and cyclonedx-bom in $(SUPPLY)"
	@$(PYTHON) -m venv $(SUPPLY)
	@$(SUPPLY)/bin/python -m pip install --disable-pip-version-check --quiet -r requirements/supply.txt
	@touch $@

$(DOCS)/.stamp: requirements/docs.txt
	@echo "── zensical in $(DOCS)"
	@$(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip install --disable-pip-version-check --quiet -r requirements/docs.txt
	@touch $@

$(TRL)/.stamp: requirements/trl.txt $(STAMPS)/cpu
	@echo "── TRL in $(TRL), beside the packages of $(VENV)"
	@$(PYTHON) -m venv $(TRL)
	@$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > $$($(TRL)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/shared.pth
	@$(TRL)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps -r requirements/trl.txt
	@touch $@

$(FRAMEWORKS)/.stamp: requirements/frameworks.txt
	@echo "── frameworks for agents in $(FRAMEWORKS), with packages of their own"
	@$(PYTHON) -m venv $(FRAMEWORKS)
	@$(FRAMEWORKS)/bin/python -m pip install --disable-pip-version-check --quiet -r requirements/frameworks.txt
	@touch $@

$(CODEX)/.stamp: Makefile
	@echo "── the Codex CLI in $(CODEX), from npm"
	@npm install --prefix $(CODEX) --no-save --no-audit --no-fund --loglevel=error @openai/codex@0.171.0
	@touch $@

$(VERIFIERS)/.stamp: requirements/verifiers.txt
	@echo "── verifiers in $(VERIFIERS), with packages of its own"
	@$(PYTHON) -m venv $(VERIFIERS)
	@$(VERIFIERS)/bin/python -m pip install --disable-pip-version-check --quiet -r requirements/verifiers.txt -e .
	@touch $@

$(INSPECT)/.stamp: requirements/inspect-eval.txt
	@echo "── Inspect in $(INSPECT), with packages of its own"
	@$(PYTHON) -m venv $(INSPECT)
	@$(INSPECT)/bin/python -m pip install --disable-pip-version-check --quiet -r requirements/inspect-eval.txt
	@touch $@

$(NEMO_GYM)/.stamp: requirements/nemo-gym.txt
	@echo "── NeMo Gym in $(NEMO_GYM), with packages of its own (1.4 GB)"
	@$(PYTHON312) -m venv $(NEMO_GYM)
	@$(NEMO_GYM)/bin/python -m pip install --disable-pip-version-check --quiet -r requirements/nemo-gym.txt
	@touch $@

$(MODEL)/model.safetensors: | $(STAMPS)/quickstart $(STAMPS)/headrace
	@$(BIN)/python -m headrace.models.starter
