"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PromptArgument = Annotated[str | None, typer.Argument(help="the prompt; - or nothing: read it from standard input")]
FileOption = Annotated[Path | None, typer.Option("--file", help="read the prompt from a file")]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="hub name, folder or GGUF file [default: the embedded SmolLM2-135M]")
]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda, … [default: cuda where there is one]")]
DtypeOption = Annotated[str | None, typer.Option(help="auto, float32, float16, bfloat16 [default: float32 on a CPU]")]
RawOption = Annotated[bool, typer.Option("--raw", help="leave the prompt as it is: no chat template")]
OtherPromptOption = Annotated[
    str | None,
    typer.Option("--other-prompt", help="the other model's prompt, for decoders of two; may be empty [default: same]"),
]
OtherModelOption = Annotated[
    str | None, typer.Option("--other-model", help="the other model, for decoders of two [default: the same one]")
]
CoupledOption = Annotated[
    bool, typer.Option("--coupled", help="spread the samples over the tree of texts; each alone is still an exact draw")
]
SeedOption = Annotated[int | None, typer.Option(help="the same seed gives the same texts [default: a new one]")]
DecodersOption = Annotated[list[str] | None, typer.Option("--decoder", help="a decoder's spec; may be repeated")]
