# Needs only Linux, Python 3.10 to 3.14 and make: the targets create their own virtual environments.

VENV := .venv
PINNED_TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH_VERSION := $(PINNED_TORCH)

# The first suitable Python that can create virtual environments. In an active one it is the Python that
# this was made from: the targets may make .venv anew. It is looked for once, where a target needs it.
PYTHON ?= $(eval PYTHON := $(FOUND_PYTHON))$(PYTHON)
FOUND_PYTHON = $(shell for python in python3.11 python3.12 python3.13 python3.10 python3.14 python3; do \
	$$python -c 'import sys, ensurepip, venv; (3, 10) <= sys.version_info[:2] <= (3, 14) or sys.exit(1); \
	print(sys._base_executable)' 2>/dev/null && break; done)

# PyTorch's index of CPU builds, if it is reachable: PyPI's builds for Linux include gigabytes of CUDA.
CPU_INDEX := https://download.pytorch.org/whl/cpu
USE_CPU_INDEX = $(shell $(PYTHON) -c 'import urllib.request; urllib.request.urlopen("$(CPU_INDEX)/torch/", timeout=5)' 2>/dev/null \
	&& echo --extra-index-url $(CPU_INDEX))

# Many images of containers set this: each of the processes that the tests start would compile all of commlens anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-fast goldens coverage frameworks clusters native-check explore lint hooks changelog bench soak compat dist page docs man pictures gallery schemas clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-22s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.demo ## Watch a real 4-process training job hang and get its diagnosis (DEMO=NAME for another fault, DEMO=--list)
	@$(VENV)/bin/python -m commlens demo $(DEMO)

# One file's tests stay in one process, where they share what they launch. Many tests wait for a stall: one worker more than there are
# cores keeps these busy, and files with few but long tests come first (pytest-xdist would run them last). WORKERS= runs all of them one
# after the other.
WORKERS := -n $(shell cores=$$(nproc); echo $$((cores < 4 ? cores + 1 : 4))) --dist loadfile --no-loadscope-reorder
# Tests without processes wait for nothing, and each worker imports torch and all tests first.
FAST_WORKERS := -n $(shell cores=$$(nproc); echo $$((cores < 4 ? cores : 4))) --dist loadfile --no-loadscope-reorder

RUN_TESTS = COMMLENS_TEST_NATIVE=$(VENV)/native-cache $(VENV)/bin/python -m pytest $(WORKERS)

test: $(VENV)/.ready $(VENV)/.browser ## Run the tests, about twelve minutes on two slow cores (ARGS="-k name" to select among all)
	$(RUN_TESTS) $(if $(ARGS),$(ARGS),-m "not long" --durations=25 --durations-min=5 --junitxml=$(VENV)/tests.xml)

test-all: $(VENV)/.ready $(VENV)/.browser ## Run the long tests, too: all world sizes, both engines everywhere, all tutorials, fresh installs, no forks for launchers
	HYPOTHESIS_PROFILE=all TEST_WITHOUT_FORKS=1 $(RUN_TESTS) $(if $(ARGS),$(ARGS),--durations=25 --durations-min=5 --junitxml=$(VENV)/tests.xml)

test-fast: $(VENV)/.ready ## Run the unit tests that start no process and need no browser, in about a minute and a half (ARGS="-k name" to select)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest tests/unit -m "not launches and not long" $(FAST_WORKERS) $(ARGS)

# The tests that hold words in golden files.
GOLDEN_TESTS = $(shell grep -rlw 'import hold' tests/unit)
goldens: $(VENV)/.ready ## Write the golden files of the verdicts' words anew, in tests/unit/diagnosis/golden: read the difference in review
	rm -rf tests/unit/diagnosis/golden
	COMMLENS_TEST_WRITE_GOLDENS=1 $(VENV)/bin/python -m pytest -q $(GOLDEN_TESTS)

coverage: $(VENV)/.ready $(VENV)/.browser ## Show which lines and branches the tests reach, in subprocesses, too (ARGS="tests/unit/watch" for a part)
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check 'coverage>=7.10'
	@rm -f $(VENV)/.coverage*
	COVERAGE_FILE=$(CURDIR)/$(VENV)/.coverage COMMLENS_TEST_NATIVE=$(VENV)/native-cache \
		$(VENV)/bin/python -m coverage run -m pytest $(WORKERS) $(if $(ARGS),$(ARGS),-m "not long") || echo "Some tests failed: the table shows what was reached."
	@COVERAGE_FILE=$(CURDIR)/$(VENV)/.coverage $(VENV)/bin/python -m coverage combine --quiet
	@COVERAGE_FILE=$(CURDIR)/$(VENV)/.coverage $(VENV)/bin/python -m coverage report $(if $(ARGS),--fail-under=0)

frameworks: $(VENV)-frameworks/.ready ## Run the examples with Accelerate, Lightning, transformers, Ray, DeepSpeed and torchft, which are installed for it (1.8 GB)
	$(VENV)-frameworks/bin/python -m pytest tests/integration/test_frameworks.py -rs $(ARGS)

$(VENV)-frameworks/.ready: pyproject.toml constraints.txt
	@rm -rf $(@D)
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check torch==$(PINNED_TORCH) $(USE_CPU_INDEX) --constraint constraints.txt
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[stacks,test]' \
		accelerate lightning transformers 'ray[train]' deepspeed torchft --constraint constraints.txt
	@touch $@

# Most of these tests wait. The cluster of Slurm, which one file's tests share, takes longest: so files with many tests come first.
clusters: $(VENV)/.clusters ## Run jobs in a real Slurm and others, with a real Prometheus (tests/clusters/README.md; what is missing is skipped)
	TEST_FT_LAUNCHER=$(CURDIR)/$(VENV)-nvrx/bin/ft_launcher $(VENV)/bin/python -m pytest tests/clusters $(filter-out --no-loadscope-reorder,$(WORKERS)) -rs --durations=10 $(ARGS)

# The schemas of Kubernetes and of Kubeflow's trainer; OpenTelemetry's packages; and NVIDIA's resiliency extension, in an environment that adds only it: its
# dependency pynvml makes torch warn.
$(VENV)/.clusters: $(VENV)/.ready
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check kubernetes-validate kubeflow_trainer_api --constraint constraints.txt \
		|| echo "The schemas of Kubernetes could not be installed: their tests will be skipped."
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check opentelemetry-exporter-otlp-proto-http opentelemetry-sdk --constraint constraints.txt \
		|| echo "OpenTelemetry's packages could not be installed: their tests will be skipped."
	@rm -rf $(VENV)-nvrx && $(VENV)/bin/python -m venv $(VENV)-nvrx
	@$(VENV)/bin/python -c 'import site; print("import site; site.addsitedir(%r)" % site.getsitepackages()[0])' \
		> $$($(VENV)-nvrx/bin/python -c 'import site; print(site.getsitepackages()[0])')/beside.pth
	@$(VENV)-nvrx/bin/python -m pip install --quiet --disable-pip-version-check --no-deps nvidia-resiliency-ext nvidia-ml-py pynvml psutil defusedxml \
		|| echo "NVIDIA's resiliency extension could not be installed: its test will be skipped."
	@touch $@

native-check: $(VENV)/.ready ## Test what the native engine does to shared memory: sanitizers, writers killed at every instruction, aarch64
	@$(VENV)/bin/python tests/native/native_check.py

explore: $(VENV)/.ready ## Run the randomised tests on new random examples
	HYPOTHESIS_PROFILE=explore $(VENV)/bin/python -m pytest tests/unit -m hypothesis $(WORKERS) $(ARGS)

lint: $(VENV)/.ready ## Check style and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

hooks: $(VENV)/.ready ## Run "make lint" before each commit, with pre-commit
	$(VENV)/bin/pre-commit install

changelog: $(VENV)/.ready ## Show the next release's entries in CHANGELOG.md, from the fragments in changelog.d/
	@$(VENV)/bin/towncrier build --draft

bench: $(VENV)/.ready ## Measure what commlens costs and how often it is right, and write docs/performance.md (ARGS=--quick for a quick trial, ARGS="--only NAME")
	COMMLENS_NATIVE_DIR=$(CURDIR)/$(VENV)/native-cache $(VENV)/bin/python -m commlens build-native || echo "The native engine is left out."
	COMMLENS_NATIVE_DIR=$(CURDIR)/$(VENV)/native-cache $(VENV)/bin/python benchmarks/run_all.py $(if $(findstring --quick,$(ARGS)),,--write) $(ARGS)

MINUTES := 60
soak: $(VENV)/.ready ## Run random jobs with and without faults, and count what commlens says (MINUTES=60; SEED=n replays one; ARGS=--write)
	COMMLENS_NATIVE_DIR=$(CURDIR)/$(VENV)/native-cache $(VENV)/bin/python -m commlens build-native >/dev/null || echo "The native engine is left out."
	COMMLENS_NATIVE_DIR=$(CURDIR)/$(VENV)/native-cache COMMLENS_TEST_NATIVE=$(VENV)/native-cache \
		$(VENV)/bin/python benchmarks/soak.py --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(ARGS)

# What differs between Pythons: syntax, the standard library, stacks, torch's build. A few scenarios start real processes.
COMPAT_TESTS := tests/unit tests/integration/test_scenarios.py tests/integration/test_launch.py tests/integration/test_capture.py
ASKED_PYTHON := $(if $(filter command environment,$(origin PYTHON)),$(PYTHON))
# pyenv runs only the versions that are switched on; PYENV_VERSION switches on the one that is asked for.
ifneq ($(filter python3.%,$(ASKED_PYTHON)),)
export PYENV_VERSION := $(ASKED_PYTHON:python%=%)
endif
PYTHON_NAME = $(shell PYENV_VERSION=$(PYENV_VERSION) $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')

compat: ## Test another Python (a part, in minutes) or torch (all tests), each in an environment of its own: make compat PYTHON=python3.12, make compat TORCH=2.6.0
	@test -n "$(TORCH)$(ASKED_PYTHON)" || { echo "Which Python or torch? For example: make compat PYTHON=python3.12, make compat TORCH=2.6.0"; exit 2; }
	@$(MAKE) --no-print-directory PYTHON=$(PYTHON) TORCH_VERSION=$(or $(TORCH),$(PINNED_TORCH)) \
		VENV=.venv$(if $(ASKED_PYTHON),-python-$(PYTHON_NAME))$(if $(TORCH),-torch-$(TORCH)) \
		test $(if $(or $(TORCH),$(ARGS)),,ARGS='$(COMPAT_TESTS) -m "not launches and not long"')

NATIVE :=
dist: $(VENV)-dist/.ready ## Build the sdist and the wheel into dist/, and check them (NATIVE=FOLDER adds the native engine's builds in it: docs/native.md)
	rm -rf dist
	COMMLENS_BUILD_NATIVE=$(NATIVE) $(VENV)-dist/bin/python -m build
	$(VENV)-dist/bin/twine check --strict dist/*
	$(VENV)-dist/bin/check-wheel-contents dist/*.whl
	@ls -l dist

$(VENV)-dist/.ready: Makefile
	@test -n "$(PYTHON)" || { echo "No suitable Python found: commlens needs Python 3.10 to 3.14 with venv (on Debian: apt install python3-venv), or PYTHON=/path/to/python."; exit 2; }
	@rm -rf $(@D)
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check 'build>=1.2' 'twine>=6' 'check-wheel-contents>=0.6'
	@touch $@

page: ## Rebuild the HTML pages' scripts and styles from web/ (the only target that needs Node.js and npm)
	cd web && npm ci --ignore-scripts --no-audit --no-fund && npm run build

docs: $(VENV)/.ready ## Build the documentation as a site in build/docs; warnings are errors
	$(VENV)/bin/python -m sphinx --fail-on-warning --keep-going --quiet -d build/doctrees docs build/docs
	@echo "Open build/docs/index.html"

man: $(VENV)/.ready ## Write the manual page, src/commlens.1, anew from the commands' options
	COLUMNS=80 $(VENV)/bin/argparse-manpage --module commlens.commands.completion --function whole_parser --format single-commands-section \
		--prog commlens --project-name commlens --manual-title commlens --output src/commlens.1 \
		--description "find the rank, the collective and the line that stopped a distributed PyTorch job"
	sed -i '1s/"[0-9\\-]*" "commlens"/"" "commlens"/' src/commlens.1  # without the date

pictures: $(VENV)/.ready $(VENV)/.browser ## Take the pictures of the docs anew, from real runs
	$(VENV)/bin/python docs/make/pictures.py

gallery: $(VENV)/.ready ## Run every scenario, and write what commlens says about it to docs/gallery.md (ten minutes)
	$(VENV)/bin/python docs/make/gallery.py

schemas: $(VENV)/.ready ## Generate the JSON schemas of the reports from their types
	$(VENV)/bin/python tests/unit/support/make_schemas.py

clean: ## Remove the virtual environments
	rm -rf .venv .venv-*

# What the demo needs: torch first, then commlens. A torch other than the pinned one chooses the versions of its own dependencies.
# pip is unpacked from the wheel that Python brings, and nothing is compiled while it is installed: to compile all modules takes longer
# than to install them. What the demo imports is compiled here, once for all ranks, while pip builds commlens: torch by one process,
# sympy, which torch imports late, and commlens by another.
UNPACK_PIP := import ensurepip, glob, os, sysconfig, zipfile; \
	wheel, = glob.glob(os.path.join(os.path.dirname(ensurepip.__file__), "_bundled", "pip-*.whl")); \
	zipfile.ZipFile(wheel).extractall(sysconfig.get_path("purelib"))
IMPORTED := import torch.distributed.run, torch.distributed.fsdp, torch.distributed.tensor.parallel
$(VENV)/.demo: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "No suitable Python found: commlens needs Python 3.10 to 3.14 with venv (on Debian: apt install python3-venv), or PYTHON=/path/to/python."; exit 2; }
	@echo "Setting up $(VENV) with $(PYTHON) and torch $(TORCH_VERSION): once; this takes minutes if torch has to be downloaded."
	@rm -rf $(VENV) || { sleep 3; rm -rf $(VENV); } # what an interrupted run compiles beside the installation may still write
	@$(PYTHON) -m venv --without-pip $(VENV)
	@$(VENV)/bin/python -c '$(UNPACK_PIP)' 2>/dev/null || $(VENV)/bin/python -m ensurepip >/dev/null
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile torch==$(TORCH_VERSION) numpy 'setuptools>=77' $(USE_CPU_INDEX) \
		$(if $(filter $(PINNED_TORCH),$(TORCH_VERSION)),--constraint constraints.txt)
	@sed 's/^torch==.*/torch==$(TORCH_VERSION)/' constraints.txt $(if $(filter $(PINNED_TORCH),$(TORCH_VERSION)),,| grep '^\(torch\|accelerate\|ruff\|mypy\|pytest\|hypothesis\)[a-z-]*==') > $(VENV)/constraints.txt
	@{ TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(VENV)/bin/python -c '$(IMPORTED)' || true; } & \
		{ $(VENV)/bin/python -c 'import sympy'; $(VENV)/bin/python -m compileall -q src || true; } & \
		$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-build-isolation --editable '.[stacks]' \
		--constraint $(VENV)/constraints.txt; status=$$?; wait; exit $$status
	@touch $@

# What the tests, the linters and the documentation need besides.
$(VENV)/.ready: $(VENV)/.demo
	@echo "Adding to $(VENV) what the tests, the linters and the documentation need: once."
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable '.[stacks,test,lint,docs]' --constraint $(VENV)/constraints.txt
	@touch $@

# A Chromium for the tests of pages: the system's, else Debian's, else the one that Playwright downloads. Without a Chromium, these tests are skipped with a message.
BROWSERS := chromium chromium-browser google-chrome google-chrome-stable
$(VENV)/.browser: $(VENV)/.ready
	@for name in $(BROWSERS); do command -v $$name >/dev/null && touch $@ && exit 0; done; \
	echo "Setting up a Chromium for the tests of pages: once."; \
	{ test "$$(id -u)" = 0 && command -v apt-get >/dev/null && export DEBIAN_FRONTEND=noninteractive \
		&& { timeout 300 apt-get install -y -qq chromium || { timeout 120 apt-get update -qq && timeout 300 apt-get install -y -qq chromium; }; } >/dev/null 2>&1; } \
	|| timeout 300 $(VENV)/bin/playwright install chromium >/dev/null 2>&1 \
	|| echo "No Chromium could be installed: the tests of pages will be skipped."; \
	touch $@
