# `make study`, and three ranges of tests: `make test`, `make check`, `make whole`. All set everything up on first use and nothing on the second.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
ENGINE_ARGS := -DCMAKE_C_FLAGS=-U__AMX_INT8__ -DCMAKE_CXX_FLAGS=-U__AMX_INT8__ -DLLAVA_BUILD=OFF -DCMAKE_PROJECT_INCLUDE=$(CURDIR)/tools/engine.cmake

.PHONY: study lint test check whole lab notebooks manifest lock clean

study: $(READY)
	@path='$(subst ','\'',$(FILES))'; case "$$path" in "~/"*) path="$$HOME/$${path#??}";; esac; \
	if [ -e "$$path" ]; then set -- --file "$$path"; else for file in $$path; do set -- "$$@" --file "$$file"; done; fi; \
	$(BIN)/plamo-study study $(if $(SCALE),--scale $(SCALE)) $(if $(MINUTES),--minutes $(MINUTES)) "$$@"

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

test: lint # behaviour: what takes a second or less
	$(BIN)/pytest tests -m "not long and not whole"

check: lint # before a commit: also types, every notebook against its outputs, every page in a browser, killed processes
	$(BIN)/pytest -m "not whole"

whole: lint # all there is, as continuous integration runs it: also every page on other rows, whole runs, hosts that die
	$(BIN)/pytest

lab: $(READY)
	$(BIN)/jupyter lab notebooks

# uv installs the tools in seconds; where only pip is told which mirror to ask, pip does. The engine comes last: its sdist
# is built with the locked CMake and Ninja, not with ones fetched at build time, and never taken from a cache, where it may
# have been built with other flags. Yours come last: CMAKE_ARGS="-DGGML_METAL=OFF" make, which engine.cmake keeps from
# being overruled: on a Mac the bindings turn Metal on whatever they are told. Without AMX: llama.cpp's kernels for it
# crash or compute PLaMo 2's batches wrongly (data/upstream). Nor what nothing here uses: the multimodal library and
# llama.cpp's `common`, half of the build.
$(READY): requirements.lock pyproject.toml
	@$(PYTHON) tools/fits.py
	$(PYTHON) -m venv .venv
	awk '/^[a-z]/ {engine = /^llama-cpp-python==/} !engine' requirements.lock > .venv/tools.lock
	awk '/^[a-z]/ {uv = /^uv==/} uv' requirements.lock > .venv/uv.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r .venv/uv.lock
	$(BIN)/uv pip install --quiet --system-certs --compile-bytecode --python .venv --no-deps --require-hashes -r .venv/tools.lock || \
		$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r .venv/tools.lock
	PATH="$(CURDIR)/$(BIN):$$PATH" CMAKE_ARGS="$(ENGINE_ARGS) $$CMAKE_ARGS" $(BIN)/pip install --disable-pip-version-check --no-build-isolation --no-cache-dir --no-deps --require-hashes -r requirements.lock --quiet
	$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	$(BIN)/python -m compileall -q src
	touch $@

notebooks: $(READY) # execute the committed notebooks as they are, on recorded rows
	$(BIN)/jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False notebooks/*.ipynb

manifest: $(READY) # after rows or prose changed on purpose; its diff says what a test saw
	$(BIN)/python tests/test_committed.py

lock: # needs uv; environment.yml is kept by hand, and a test compares it
	uv pip compile pyproject.toml --universal --generate-hashes --extra dev --extra build --extra fleet --python-version 3.11 --no-emit-index-url --no-annotate --no-header -o requirements.lock

clean:
	rm -rf .venv reports
