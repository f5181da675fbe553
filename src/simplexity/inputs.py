"""What the commands are given, made ready: prompts, decoders, models, masks, files to write; and signs of life."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from simplexity.decoders import decoder
from simplexity.files import FORMATS, check_writable
from simplexity.show import terminal


def check_outputs(plot: Path | None, page: Path | None) -> None:
    """What could not be written is said before the work, not after."""
    if plot is not None and plot.suffix.lower() not in FORMATS:
        raise ValueError(f"cannot draw {plot}: the name must end in {', '.join(FORMATS)}")
    for path in (plot, page):
        if path is not None:
            check_writable(path)


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt given, or that of a file or of standard input."""
    if file is not None:
        if prompt is not None:
            raise ValueError("give the prompt or --file, not both")
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{file} is not a text file in UTF-8") from None
        except OSError as error:
            raise ValueError(f"cannot read {file}: {error.strerror}") from None
        text = text.removesuffix("\n")
    elif prompt is None or prompt == "-":
        if sys.stdin.isatty():
            raise ValueError('give a prompt: simplexity generate "Why is the sky blue?", or pipe one in')
        text = sys.stdin.read().removesuffix("\n")
    else:
        text = prompt
    if not text.strip():
        raise ValueError("the prompt is empty")
    return text


def lack(chosen: Any, two: bool) -> str | None:
    """What a decoder needs and was not given, in a sentence; `two`: there is another model."""
    if "other" in chosen.needs and not two:
        return f"{chosen.name} needs another model's logits: give --other-prompt or --other-model"
    if "rewards" in chosen.needs:
        return f"{chosen.name} needs a reward for every token: it is used from Python, with generate(…, rewards=…)"
    return None


def usable(specs: Sequence[str], two: bool) -> list[str]:
    """The decoders that have what they need; a line says which do not."""
    lacks = {spec: lack(decoder(spec), two) for spec in specs}
    said = [f"{spec} is left out: {lack}" for spec, lack in lacks.items() if lack is not None]
    if len(said) == len(lacks):
        raise ValueError("; ".join(lack for lack in lacks.values() if lack is not None))
    for line in said:
        note(line)
    return [spec for spec in specs if lacks[spec] is None]


def second_model(
    first: Any, prompt: str, other: str | None, name: str | None, raw: bool, device: str | None, dtype: str | None
) -> Any:
    """The second model of the options, under its prompt; None where there is none."""
    if other is None and name is None:
        return None
    from simplexity.engines.other_model import OtherModel

    second = first if name is None else load(name, device, dtype)
    if second.tokenizer.get_vocab() != first.tokenizer.get_vocab():
        raise ValueError(f"{second.name} and {first.name} have different tokens: two models must share a tokenizer")
    inputs = second.encode([prompt if other is None else other], raw, empty=True)
    return OtherModel(second.model, **inputs)


def read_schema(path: Path) -> Any:
    """The JSON of a file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


def masks_for(language_model: Any, schema: Any, banned: list[str]) -> list[Any]:
    """What may come next, by a JSON schema and by banned strings."""
    from simplexity.masks.banned import BannedStrings
    from simplexity.masks.grammar import Grammar

    masks: list[Any] = []
    if schema is not None:
        masks.append(Grammar.json_schema(language_model.tokenizer, schema, language_model.ends))
    if banned:
        masks.append(BannedStrings(language_model.tokenizer, banned))
    return masks


def load(name: str | None, device: str | None, dtype: str | None) -> Any:
    """A model, with a sign of life while it is read."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    bars = terminal.console(stderr=True)
    with Progress(*columns, console=bars, transient=True, disable=not bars.is_terminal) as bar:
        bar.add_task("loading the model", total=None)
        from simplexity.models import load_model, quiet_transformers

        quiet_transformers()
        return load_model(name, device, dtype)


@contextmanager
def progress(what: str, total: int, quiet: bool = False) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr; `quiet` where the text itself shows the progress."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bars = terminal.console(stderr=True)
    with Progress(*columns, console=bars, transient=True, disable=quiet or not bars.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def note(message: Warning | str, *_: Any, **__: Any) -> None:
    """A line on stderr."""
    print(f"note: {message}", file=sys.stderr)
