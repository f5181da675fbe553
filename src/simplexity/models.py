"""Language models to try decoders on: a small one that comes as a wheel, or any other by name, folder or file."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from simplexity import embedded

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

GGUF_MAGIC = b"GGUF"


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A causal language model of transformers with its tokenizer."""

    name: str
    model: Any
    tokenizer: Any

    @property
    def context(self) -> int | None:
        """How many tokens prompt and answer may have together; None where the model does not say."""
        return getattr(self.model.config, "max_position_embeddings", None)

    @property
    def ends(self) -> list[int]:
        """The tokens that end a text."""
        return end_tokens(self.model.generation_config, self.tokenizer)

    def encode(
        self, prompts: Sequence[str], raw: bool = False, system: str | None = None, empty: bool = False
    ) -> dict[str, Tensor]:
        """Token ids and attention mask `[n, length]`, padded on the left, on the model's device.

        Each prompt is put through the model's chat template, as the one message of a user, after the `system` message
        where there is one; `raw` leaves it as it is. `empty` lets a prompt be empty.
        """
        ids = prompt_ids(self.tokenizer, prompts, raw, system, empty, self.name, self.context)
        length = max(map(len, ids))
        fill = self.tokenizer.pad_token_id
        fill = self.tokenizer.eos_token_id if fill is None else fill
        fill = 0 if fill is None else fill
        table = torch.full((len(ids), length), fill)
        mask = torch.zeros_like(table)
        for i, row in enumerate(ids):
            table[i, length - len(row) :] = torch.tensor(row)
            mask[i, length - len(row) :] = 1
        return {"input_ids": table.to(self.model.device), "attention_mask": mask.to(self.model.device)}

    @torch.inference_mode()
    def next_scores(self, prompt: str, raw: bool = False) -> Tensor:
        """The logits of the first token after the prompt, float32 `[V]`, on the CPU."""
        logits = self.model(**self.encode([prompt], raw)).logits
        return logits[0, -1].float().cpu()

    def text(self, ids: Sequence[int] | Tensor) -> str:
        """Token ids as text, without special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def prompt_ids(
    tokenizer: Any,
    prompts: Sequence[str],
    raw: bool = False,
    system: str | None = None,
    empty: bool = False,
    name: str = "the model",
    context: int | None = None,
) -> list[list[int]]:
    """The token ids of each prompt, as `LanguageModel.encode` has them; a ValueError where one leaves no room."""
    if not prompts:
        raise ValueError("give at least one prompt")
    for prompt in prompts:
        if not prompt.strip() and not empty:
            raise ValueError("the prompt is empty")
    ids = [_ids(tokenizer, prompt, raw, system, name) for prompt in prompts]
    length = max(map(len, ids))
    if context is not None and length >= context:
        raise ValueError(
            f"the prompt has {length} tokens and {name} reads {context} at most, the answer included: shorten it"
        )
    return ids


def _ids(tokenizer: Any, prompt: str, raw: bool, system: str | None, name: str) -> list[int]:
    if raw:
        start = tokenizer.bos_token_id  # a model must read something
        return tokenizer(prompt)["input_ids"] or ([] if start is None else [start])
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"{name} has no chat template: pass the prompt as it is (--raw)")
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def end_tokens(generation_config: Any, tokenizer: Any) -> list[int]:
    """The tokens that end a text."""
    found = generation_config.eos_token_id
    found = tokenizer.eos_token_id if found is None else found
    return [] if found is None else found if isinstance(found, list) else [found]


def load_model(name: str | None = None, device: str | None = None, dtype: str | None = None) -> LanguageModel:
    """A model by hub name, local folder or GGUF file; the embedded one by its own name, or when none is given.

    device: "cuda" where there is one, else "cpu".
    dtype:  "float32" on a CPU, else what the model was saved in.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        raise ValueError("transformers is not installed; get it with: pip install 'simplexity[cli]'") from None
    try:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ValueError(f"unknown device {device!r}: use cpu, cuda or cuda:1") from None
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device!r}: this machine has no CUDA device; use cpu")
    if place.index is not None and place.type == "cuda":
        torch.cuda.set_device(place)  # kernels and graphs run on the current one
    if dtype not in (None, "auto", "float32", "float16", "bfloat16"):
        raise ValueError(f"dtype must be one of auto, float32, float16, bfloat16, got {dtype!r}")
    dtype = dtype or ("float32" if place.type == "cpu" else "auto")
    where, options = located(name)
    with loading(name, where):
        if not options:
            AutoConfig.from_pretrained(where)  # a name that leads nowhere fails here once, not in every file
        tokenizer = AutoTokenizer.from_pretrained(where, **options)
        model: Any = AutoModelForCausalLM.from_pretrained(where, dtype=dtype, **options)
        model = model.to(place).eval()
    tokenizer.padding_side = "left"
    return LanguageModel(name or embedded.NAME, model, tokenizer)


def quiet_transformers() -> None:
    """No bars, no advice: a command line has its own."""
    from huggingface_hub.utils import logging as hub_logging
    from tqdm import tqdm
    from transformers.utils import logging

    silent: Any = partialmethod(tqdm.__init__, disable=True)
    tqdm.__init__ = silent  # some of its bars know no other way
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()


@contextmanager
def loading(name: str | None, where: str) -> Iterator[None]:
    """Whatever goes wrong becomes a ValueError that names the model."""
    try:
        yield
    except Exception as error:  # a damaged file makes its readers fail in any way
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        hint = "" if Path(where).is_dir() else " Is the name right, and the hub reachable?"
        raise ValueError(f"cannot load the model {name or embedded.NAME!r}: {first}{hint}") from error


def located(name: str | None) -> tuple[str, dict[str, str]]:
    """The place as transformers wants it: a folder or a hub name, and the GGUF file in it if it is one."""
    path = Path(name or embedded.NAME).expanduser()
    if name is None or (name == embedded.NAME and not path.exists()):
        path = embedded.unpacked()
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) != GGUF_MAGIC:
                raise ValueError(f"{path} is not a GGUF file; a model is a hub name, a folder or a GGUF file")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ValueError(f"the folder {path} holds no config.json: it is not a saved model")
        return str(path), {}
    if path.suffix == ".gguf" or str(name).startswith((".", "/", "~")) or str(name).count("/") > 1:
        raise ValueError(f"there is no model at {name}")
    return str(name), {}
