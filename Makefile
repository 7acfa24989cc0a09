# Every target sets up what it needs on a fresh machine with Python (3.11 to 3.13), a C++ compiler and make.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
NEWEST := .venv-newest
ZOO := .venv-zoo
CLIENTS := .venv-clients

.PHONY: demo test test-newest test-cuda zoo clients quick check docs bench wheel clean
.DEFAULT_GOAL := test

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@

# A file of tests stays with one worker, which keeps its ranks from test to test; files are taken in the order of
# tests/conftest.py, in which the small ones of tests/unit fill the end. Each worker reads all files, and what one of
# them has compiled the others need not compile again.
test: $(VENV)/.ready
	$(BIN)/python -m opensmd.native.build
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

# The newest supported torch, without the packages it needs on GPUs only: pip resolves nothing here.
$(NEWEST)/.ready: pyproject.toml requirements-newest.txt
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/pip install -q --no-compile --no-deps -r requirements-newest.txt
	$(NEWEST)/bin/pip install -q --no-deps -e .
	touch $@

# The tests marked `newest`. Only files with the marker are collected: others import more than is installed there.
test-newest: $(NEWEST)/.ready
	$(NEWEST)/bin/python -m opensmd.native.build
	$(NEWEST)/bin/python -m pytest -m newest $$(grep -rl --include='test_*.py' 'mark\.newest' tests)

# What handles CUDA tensors, on a machine with a GPU; one is enough, its ranks share it.
test-cuda: $(VENV)/.ready
	$(BIN)/python -m opensmd.native.build
	$(BIN)/python -m pytest tests/cuda

# The libraries whose models the zoo trains, whole and with all that they need: pip resolves nothing here.
$(ZOO)/.ready: pyproject.toml requirements-zoo.txt
	$(PYTHON) -m venv $(ZOO)
	$(ZOO)/bin/pip install -q --no-compile --no-deps -r requirements-zoo.txt
	$(ZOO)/bin/pip install -q --no-deps -e .
	touch $@

# Models of sixteen libraries in parts against plain PyTorch: hours on two cores; goes on where it was cut off.
# Renews docs/zoo.md.
zoo: $(ZOO)/.ready
	$(ZOO)/bin/python -m opensmd.native.build
	$(ZOO)/bin/python -m tests.zoo
	$(ZOO)/bin/python -m tests.zoo.report

# Libraries that train over smddp, the newest and some older ones. Nothing is compiled before it is imported: most
# of what they install never is.
$(CLIENTS)/.ready: pyproject.toml requirements-clients.txt $(wildcard tests/clients/older/*.txt)
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip install -q --no-compile --no-deps -r requirements-clients.txt
	DS_BUILD_OPS=0 $(CLIENTS)/bin/pip install -q --no-compile --no-deps --no-build-isolation deepspeed==0.19.8
	for list in tests/clients/older/*.txt; do $(CLIENTS)/bin/pip install -q --no-compile --no-deps --upgrade \
		--target $(CLIENTS)/older/$$(basename $$list .txt) -r $$list || exit 1; done
	$(CLIENTS)/bin/pip install -q --no-deps -e .
	touch $@

# Each trains on two ranks, and is compared with itself over gloo.
clients: $(CLIENTS)/.ready
	$(CLIENTS)/bin/python -m opensmd.native.build
	env -u PYTHONDONTWRITEBYTECODE $(CLIENTS)/bin/python -m pytest --timeout 300 tests/clients

# Data parallelism over smddp, smddp against gloo, a GPT split over 2 and 2 x 2 processes,
# and one that does not fit into one of four: about 3 minutes.
demo: $(VENV)/.ready
	$(BIN)/python examples/demo.py

# All benchmarks, alone on the machine: about an hour on two cores. Renews docs/benchmarks.md.
bench: $(VENV)/.ready
	$(BIN)/python -m opensmd.native.build
	$(BIN)/python -m benchmarks.harness.mpi
	$(BIN)/python -m benchmarks.floor
	$(BIN)/python -m benchmarks.allreduce
	$(BIN)/python -m benchmarks.allreduce --dtypes bfloat16 float16 float64 int64 uint8 --sizes 8 65536 4194304 --mpi
	$(BIN)/python -m benchmarks.collectives
	-$(CLIENTS)/bin/python -m benchmarks.small_messages  # beside DeepSpeed, which make clients installs
	$(BIN)/python -m benchmarks.ddp
	$(BIN)/python -m benchmarks.pipeline
	$(BIN)/python -m benchmarks.one_partition
	$(BIN)/python -m benchmarks.tensor_parallel
	$(BIN)/python -m benchmarks.sharded
	$(BIN)/python -m benchmarks.allocator
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.resident
	$(BIN)/python -m benchmarks.saving
	$(BIN)/python -m benchmarks.timeline
	-$(BIN)/python -m benchmarks.hosts  # needs the right to make network namespaces
	$(BIN)/python -m benchmarks.report

# After every edit, under a minute: what needs no other process.
quick: $(VENV)/.ready
	$(BIN)/ruff format --no-cache --check .
	$(BIN)/ruff check --no-cache .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -n auto -m "not processes" tests/unit

check: $(VENV)/.ready
	$(BIN)/ruff format --no-cache --check .
	$(BIN)/ruff check --no-cache .
	$(BIN)/mypy
	$(BIN)/mkdocs build

# The documentation with the reference of the API as a site in out/docs; links that lead nowhere are errors.
docs: $(VENV)/.ready
	$(BIN)/mkdocs build
	@echo "out/docs/index.html"

# The source distribution, and a wheel with the core inside for the torch in .venv.
wheel: $(VENV)/.ready
	$(BIN)/python release/wheel.py --out dist

clean:
	rm -rf $(VENV) $(NEWEST) $(ZOO) $(CLIENTS) build out dist
