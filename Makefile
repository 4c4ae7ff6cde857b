# Two commands: `make study` and `make test`. Both set everything up on first use and nothing on the second.
PYTHON ?= python3
SCALE ?= mini
BIN := .venv/bin
READY := .venv/.ready

.PHONY: study test lab notebooks lock clean

study: $(READY)
	$(BIN)/plamo-study study --scale $(SCALE)

test: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pytest --nbval notebooks -n 0
	$(BIN)/pytest

lab: $(READY)
	$(BIN)/jupyter lab notebooks

# The engine comes last: its sdist is built (CMAKE_ARGS reaches it) with the locked CMake and Ninja, not with ones fetched at build time.
$(READY): requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	awk '/^[a-z]/ {engine = /^llama-cpp-python==/} !engine' requirements.lock > .venv/tools.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r .venv/tools.lock
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pip install --disable-pip-version-check --no-build-isolation --require-hashes -r requirements.lock --quiet
	$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	touch $@

notebooks: $(READY) # execute the committed notebooks as they are, on recorded rows
	$(BIN)/jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False notebooks/*.ipynb

lock: # needs uv; environment.yml is checked against the result by a test
	uv pip compile pyproject.toml --universal --generate-hashes --extra dev --extra build --python-version 3.11 --no-emit-index-url --no-annotate --no-header -o requirements.lock

clean:
	rm -rf .venv reports
