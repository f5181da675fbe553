# Everything runs in .venv, made on first use; PYTHON may name another Python >= 3.11.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test lint format bench clean

demo: $(INSTALLED)  ## the decoders at work on three tokens and on a real row of logits
	$(BIN)/python examples/demo.py

test: $(INSTALLED)  ## every test, doctests and the README's code included
	$(BIN)/python -m pytest

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
	touch $@

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build
