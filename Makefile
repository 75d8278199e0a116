# The first commands: `make demo` and `make test`.  Each makes the environment it needs and does not make it twice.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt
# The tensors of demo and tests are small: one thread per process is faster than two that wait for each other.
RUN := OMP_NUM_THREADS=1 $(BIN)
# Byte code is kept, also where the environment says otherwise: tests and Flower start many processes, and pytest
# rewrites every test file again without it.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test slow coverage lint types check docs names report pictures flower known-modules flower-demo flower-kill-points results kill-points soak mutants fuzz wheel audit clean

demo: $(VENV)/.installed
	$(RUN)/selffl demo --out runs/demo

# A process per core, which takes over tests from the other when it has none left.
PYTEST := $(RUN)/python -m pytest --numprocesses=logical --dist=worksteal
SITE := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# All but the slow ones.  COVERED=yes leaves out what `make coverage` has just run.
test: $(VENV)/.installed-dev
	SELFFL_COVERED="$(if $(COVERED),$(TRACED))" $(PYTEST) -m "not slow"

# Tests that take longer, by file, so that what they share is made once: the longest first, and others go on beside them.
# The site, which some of them look at, is built meanwhile: they wait for the file `built` in it.
LONGEST := $(addprefix tests/,test_kill_points.py reports/test_report_browser.py test_estimator.py test_docs_site.py algorithms/test_auto.py test_docs.py)
SLOW := $(LONGEST) $(filter-out $(LONGEST),$(shell grep -rlE "mark[.]slow" --include="test_*.py" tests | sort))

slow: $(VENV)/.installed-dev
	@rm -rf site; { $(SITE) && touch site/built; } & site=$$!; \
	SELFFL_SITE=$(CURDIR)/site $(PYTEST) -m slow --dist=loadfile --no-loadscope-reorder $(SLOW); tested=$$?; wait $$site && exit $$tested

# The maths and the methods have to be covered by their own tests.  Those that run lines that others of them run, too, are
# not traced, which is twice as fast.
SECOND_LOOKS := exam claims twins cnn_twins auto auto_closing kept_optimisers optimisers reductions schedules training_options worked_method
UNTRACED := $(SECOND_LOOKS:%=tests/algorithms/test_%.py)
TRACED := $(filter-out $(UNTRACED),$(wildcard tests/maths/test_*.py tests/algorithms/test_*.py))

coverage: $(VENV)/.installed-dev
	$(PYTEST) $(TRACED) -m "not slow" --cov=src/selffl/maths --cov=src/selffl/algorithms --cov-branch --cov-fail-under=95 --cov-report=term:skip-covered

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

check: lint types coverage test slow

docs: $(VENV)/.installed-dev
	$(SITE)

# The names that a shell completes, anew from the registries.
names: $(VENV)/.installed-dev
	$(RUN)/python tools/write_names.py

# The technical report as a PDF, its numbers and figures from the results pages.
report: $(VENV)/.installed-dev
	$(RUN)/python docs/make_report.py report.pdf

# The pictures of the README and the first pages, from real runs; needs Chromium and two or three minutes.
pictures: $(VENV)/.installed-dev
	$(RUN)/python docs/make_pictures.py

# The engine on Flower, whose pins clash with ours: in an environment of its own.
FLOWER := FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 OMP_NUM_THREADS=1 .venv-flower/bin

# Deployments come first: they take longest, and other files go on beside them.
flower: .venv-flower/.installed
	$(FLOWER)/python -m pytest -q --numprocesses=2 --dist=loadfile --no-loadscope-reorder tests/deploy tests/engines/flower tests/runs/test_flower.py tests/runs/test_flower_modules.py \
		tests/runs/test_flower_kills.py tests/test_cli_flower.py tests/test_dependencies.py \
		"tests/test_benchmarks.py::test_a_benchmark_prints_its_ratios_and_writes_its_file[flower_rounds]"

# Modules of torchvision, Hugging Face and peft, in an environment of its own.  Torchvision is left out where the build that
# pip finds does not fit torch's: then it cannot be imported, and transformers with it.
known-modules: .venv-known/.installed
	OMP_NUM_THREADS=1 .venv-known/bin/python -m pytest -q -rs tests/runs/test_known_modules.py tests/adapters/test_peft.py "tests/test_docs.py::test_the_blocks_of_a_page_run_in_one_folder[howto/adapters]"

# A server and three sites on this machine, with TLS and registered keys; one of them fails and comes back.
flower-demo: .venv-flower/.installed
	$(FLOWER)/python deploy/demo.py --out runs/flower-demo

# The numbers on the results pages that two cores can make in half an hour, anew.  The others need data that are not in the
# package, more cores or a GPU (`selffl paper list`; `selffl paper run cifar10 --device cuda --processes 16`); without
# their records the pages keep what they say of them.
results: $(VENV)/.installed
	$(RUN)/selffl paper run limits convergence synthetic-homogeneous synthetic-heterogeneous augmented-synthetic --out runs/paper
	$(RUN)/selffl paper run femnist femnist-ablation --out runs/paper
	$(RUN)/selffl paper page runs/paper --out docs/results.md
	$(RUN)/python docs/benchmarks.py

# Every file operation of train, resume, run, compare and a study is killed once, and what goes on is compared: minutes.
kill-points: $(VENV)/.installed-dev
	PYTHONPATH=tests $(RUN)/python tests/kill_points.py

# The same for Flower's server and its clients.
flower-kill-points: .venv-flower/.installed
	PYTHONPATH=tests $(FLOWER)/python tests/engines/flower/flower_kill_points.py

# Which mutants of the maths, the methods, the state and the checks of messages do tests notice?  So many of each, drawn at
# random: make mutants SAMPLE=300.  Hours without a sample.
SAMPLE ?= 300
mutants: $(VENV)/.installed-dev .venv-flower/.installed
	for package in maths state algorithms; do $(RUN)/python tests/mutants/run.py $$package --sample $(SAMPLE) --out runs/mutants.jsonl || exit 1; done
	.venv-flower/bin/python -m pip install --quiet $$($(BIN)/python -m pip freeze | grep ^coverage==)
	$(FLOWER)/python tests/mutants/run.py flower --sample $(SAMPLE) --out runs/mutants.jsonl

# Ten thousand rounds of three methods: memory and files.
soak: $(VENV)/.installed-dev
	$(RUN)/python tests/soak.py

# Every parser is fuzzed, coverage-guided, so many minutes each, one after the other: make fuzz MINUTES=60.
MINUTES ?= 60
fuzz: .venv-fuzz/.installed
	FLWR_TELEMETRY_ENABLED=0 OMP_NUM_THREADS=1 .venv-fuzz/bin/python tests/fuzz/fuzz.py --minutes $(MINUTES)

# A wheel whose bytes depend on the commit alone: it is built twice, and both have to be the same.
wheel: $(VENV)/.installed
	@rm -rf dist build; export SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct); \
	for folder in dist build/again; do $(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir $$folder . || exit 1; done
	cmp dist/*.whl build/again/*.whl && sha256sum dist/*.whl

# What is installed, as a CycloneDX list (sbom.json), and a check that no licence of it binds whoever uses it by the GPL.
audit: $(VENV)/.installed-dev
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python -m pip install --quiet cyclonedx-bom==7.5.0 pip-licenses==5.5.5
	.venv-audit/bin/cyclonedx-py environment $(BIN)/python --output-format JSON --output-file sbom.json
	.venv-audit/bin/pip-licenses --python=$(BIN)/python --partial-match --fail-on="GNU General;GNU Affero;GPL-2;GPL-3;AGPL"

clean:
	rm -rf $(VENV) .venv-flower .venv-known .venv-fuzz .venv-audit site dist build sbom.json runs .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) --editable ".[dev,docs]"
	@touch $@ $(VENV)/.installed

.venv-known/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-known
	.venv-known/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[known-modules]" pytest pytest-xdist hypothesis scikit-learn
	.venv-known/bin/python -c "import torchvision" 2>/dev/null || .venv-known/bin/python -m pip uninstall --quiet --yes torchvision
	@touch $@

.venv-flower/.installed: pyproject.toml constraints-flower.txt
	$(PYTHON) -m venv .venv-flower
	.venv-flower/bin/python -m pip install --quiet --constraint constraints-flower.txt --editable ".[flower,simulation]" pytest pytest-xdist hypothesis
	@touch $@

.venv-fuzz/.installed: pyproject.toml constraints-flower.txt
	$(PYTHON) -m venv .venv-fuzz
	.venv-fuzz/bin/python -m pip install --quiet --constraint constraints-flower.txt --editable ".[flower]" atheris==3.0.0
	@touch $@
