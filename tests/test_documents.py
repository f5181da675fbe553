"""The code in the documents runs and prints what they say it prints."""

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ENGINES = ("llama_cpp", "sglang", "vllm")  # in environments of their own: their examples are run by tests/engines
EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*.py")) if not path.name.startswith(ENGINES)]
LONG = ("spend_samples.py",)  # a minute and more
DOCUMENTS = [path for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")] if "```python" in path.read_text()]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_document(path):
    from simplexity.decoding import REGISTRY

    before = dict(REGISTRY)
    names: dict[str, object] = {}
    blocks = re.findall(r"```(python|output)\n(.*?)```", path.read_text(), re.S)
    assert blocks, f"{path.name} has no code to run"
    printed = ""
    try:
        for kind, text in blocks:
            if kind == "output":
                assert printed.strip() == text.strip()
                continue
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(text, path.name, "exec"), names)
            printed = out.getvalue()
    finally:
        REGISTRY.clear()
        REGISTRY.update(before)


def test_the_readme_lists_every_decoder_and_every_source_file():
    from simplexity import decoders

    readme = (ROOT / "README.md").read_text()
    for name in decoders():
        assert f"`{name}`" in readme
    for path in (ROOT / "src" / "simplexity").iterdir():
        if path.suffix == ".py" or (path / "__init__.py").exists():
            assert path.name in readme or path.name == "__init__.py", f"the map of the source tree lacks {path.name}"


def test_the_readme_opens_with_what_a_reader_needs():
    readme = (ROOT / "README.md").read_text()
    (first, *_) = re.findall(r"```python\n(.*?)```", readme, re.S)
    assert len([line for line in first.splitlines() if line.strip()]) <= 10
    (commands, *_) = re.findall(r"```\n(.*?)```", readme, re.S)
    assert [line.split("#")[0].strip() for line in commands.splitlines()] == ["make demo", "make test"]
    assert re.search(r"max  <q, s> − λ·Ω\(q\).*\n     │\n     ├── .*greedy", readme), "the tree of decoders is gone"
    assert "| name | Ω(q) | λ | support C | solver |" in readme


@pytest.mark.xdist_group("model")
@pytest.mark.parametrize(
    "path", [pytest.param(p, marks=pytest.mark.slow if p.name in LONG else (), id=p.name) for p in EXAMPLES]
)
def test_example(path):
    assert len(path.read_text().splitlines()) < 40
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=True)
    assert done.stdout.strip()
