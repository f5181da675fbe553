"""The command line: reads arguments, calls the library, prints."""

from __future__ import annotations

import json
import secrets
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from typer._click.exceptions import NoArgsIsHelpError
    from typer.exceptions import TyperException
except ImportError:
    sys.exit("the command line needs a few more packages: pip install 'simplexity[cli]'")

import torch
from rich.text import Text

import simplexity
from simplexity.context import Context
from simplexity.decoders import decoder, decoders
from simplexity.evaluation import commands
from simplexity.explaining import DEFAULT, ascent_path, explain_step
from simplexity.files import whole_file
from simplexity.inputs import (
    check_outputs,
    lack,
    load,
    masks_for,
    note,
    progress,
    read_prompt,
    read_schema,
    second_model,
    usable,
)
from simplexity.options import (
    CoupledOption,
    DecodersOption,
    DeviceOption,
    DtypeOption,
    FileOption,
    ModelOption,
    OtherModelOption,
    OtherPromptOption,
    PromptArgument,
    RawOption,
    SeedOption,
)
from simplexity.show import terminal
from simplexity.specs import nearest

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Decode language models by stated objectives: try decoders, compare them, see what they do.",
)  # fmt: skip


def main() -> None:
    """Run; an error is one line on stderr and exit code 2, with --debug a traceback."""
    arguments = [a for a in sys.argv[1:] if a != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1
    warnings.showwarning = note
    try:
        sys.exit(app(arguments, prog_name="simplexity", standalone_mode=False) or 0)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # whoever was reading has seen enough
        sys.stderr.close()
        sys.exit(0)
    except NoArgsIsHelpError as error:
        print(error.format_message())
        sys.exit(2)
    except (TyperException, ValueError, OSError, ImportError) as error:
        if debug:
            raise
        said = error.format_message() if isinstance(error, TyperException) else str(error)
        print(f"error: {' '.join(said.split())}", file=sys.stderr)
        sys.exit(2)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    """Global options; --debug anywhere shows tracebacks."""
    if show:
        print(simplexity.__version__)
        raise typer.Exit


@app.command()
def generate(
    prompt: PromptArgument = None,
    spec: Annotated[str, typer.Option("--decoder", help="the decoder's spec")] = "softmax",
    n: Annotated[int, typer.Option("-n", min=1, help="how many samples")] = 1,
    seed: SeedOption = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="how many tokens at most")] = 128,
    coupled: CoupledOption = False,
    mode: Annotated[bool, typer.Option("--mode", help="take the mode of q at each step instead of drawing")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, with log q and log p of every token")] = False,
    other_prompt: OtherPromptOption = None,
    other_model: OtherModelOption = None,
    schema: Annotated[
        Path | None, typer.Option("--json-schema", help="write JSON that is valid under the schema in this file")
    ] = None,
    banned: Annotated[
        list[str] | None, typer.Option("--ban", help="a string that must not appear; may be repeated")
    ] = None,
    file: FileOption = None,
    raw: RawOption = False,
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Write text with one decoder."""
    chosen, text = decoder(spec), read_prompt(prompt, file)
    two = other_prompt is not None or other_model is not None
    if (missing := lack(chosen, two)) is not None:
        raise ValueError(missing)
    if two and not chosen.reads("other"):
        raise ValueError(f"{chosen.name} looks at one model alone: leave out --other-prompt and --other-model")
    rules = None if schema is None else read_schema(schema)
    seed = secrets.randbits(63) if seed is None else seed
    language_model = load(model, device, dtype)
    from simplexity.engines.transformers import generate as write
    from simplexity.show.streaming import Stream

    inputs = language_model.encode([text], raw)
    other = second_model(language_model, text, other_prompt, other_model, raw, device, dtype)
    masks = masks_for(language_model, rules, banned or [])
    with progress(f"{n} samples", max_tokens, quiet=not as_json and n == 1) as advance:
        stream = Stream(language_model.tokenizer, None if as_json else sys.stdout, advance, show=n == 1)
        found = write(
            language_model.model, inputs["input_ids"], chosen, n, max_tokens, [seed],
            mode=mode, trace=as_json, streamer=stream, other=other, masks=masks, coupled=coupled,
            attention_mask=inputs["attention_mask"],
        )  # fmt: skip
    samples = [language_model.text(row) for row in found.tokens]
    if as_json:
        print(
            json.dumps(
                _as_data(language_model.name, chosen, text, seed, samples, found), ensure_ascii=False, default=str
            )
        )
    elif n > 1:
        for i, sample in enumerate(samples):
            terminal.console().print(Text(f"— {i + 1} —", style="dim"))
            print(sample.strip())


@app.command()
def compare(
    prompt: PromptArgument = None,
    specs: DecodersOption = None,
    n: Annotated[int, typer.Option("-n", min=1, help="samples of each decoder")] = 4,
    seed: SeedOption = None,
    coupled: CoupledOption = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="how many tokens at most")] = 64,
    page: Annotated[Path | None, typer.Option("--html", help="also write one self-contained page")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="also draw a figure (.png, .svg, .pdf)")] = None,
    other_prompt: OtherPromptOption = None,
    other_model: OtherModelOption = None,
    file: FileOption = None,
    raw: RawOption = False,
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Write with several decoders on the same prompt, and compare."""
    two = other_prompt is not None or other_model is not None
    chosen, text = usable(specs or DEFAULT, two), read_prompt(prompt, file)
    check_outputs(plot, page)
    seed = secrets.randbits(31) if seed is None else seed
    language_model = load(model, device, dtype)
    other = second_model(language_model, text, other_prompt, other_model, raw, device, dtype)
    from simplexity.comparing import compare as run

    with progress("decoders", len(chosen)) as advance:
        results = run(language_model, text, chosen, n, max_tokens, seed, raw, lambda _: advance(), other, coupled)
    out = terminal.console()
    out.print(Text(text, style="bold"))
    out.print(terminal.show_comparison(results, n))
    step = _explained(language_model, text, chosen, raw, other)
    if page is not None:
        from simplexity.show.page import compare_page

        with whole_file(page) as draft:
            draft.write_text(compare_page(results, step, text, language_model.name, n, seed), encoding="utf-8")
        print(f"wrote {page}")
    if plot is not None:
        from simplexity.show.figures import compare_figure, save

        save(compare_figure(results, _short(text)), plot)
        print(f"wrote {plot}")


@app.command()
def explain(
    prompt: PromptArgument = None,
    specs: DecodersOption = None,
    top: Annotated[int, typer.Option(min=1, help="how many tokens to show")] = 8,
    plot: Annotated[Path | None, typer.Option("--plot", help="draw a figure too (.png, .svg, .pdf)")] = None,
    simplex: Annotated[
        Path | None, typer.Option("--simplex", help="draw the three-token simplex to this file; needs no prompt")
    ] = None,
    scores: Annotated[str, typer.Option(help="--simplex: the three scores")] = "3,2,0",
    other_prompt: OtherPromptOption = None,
    other_model: OtherModelOption = None,
    file: FileOption = None,
    raw: RawOption = False,
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Show the next-token distribution before and after each decoder, with its certificate."""
    chosen = usable(specs or DEFAULT, other_prompt is not None or other_model is not None)
    check_outputs(plot, None)
    check_outputs(simplex, None)
    out = terminal.console()
    if simplex is not None:
        _draw_simplex(simplex, scores, usable(specs or SIMPLEX, False))
        print(f"wrote {simplex}")
        if prompt is None and file is None:
            return
    text = read_prompt(prompt, file)
    language_model = load(model, device, dtype)
    other = second_model(language_model, text, other_prompt, other_model, raw, device, dtype)
    step = _explained(language_model, text, chosen, raw, other, top)
    out.print(Text(text, style="bold"))
    out.print(Text("The next token: the model's probability → the decoder's.\n", style="dim"))
    out.print(terminal.show_step(step, out.width))
    if plot is not None:
        from simplexity.show.figures import explain_figure, save

        save(explain_figure(step, _short(text)), plot)
        print(f"wrote {plot}")


@app.command("decoders")
def list_decoders(name: Annotated[str | None, typer.Argument(help="one decoder, to be explained")] = None) -> None:
    """List the decoders with their parameters and objectives, or explain one."""
    known = decoders()
    if name is None:
        terminal.console().print(terminal.list_decoders(known))
    elif name in known:
        terminal.console().print(terminal.explain_decoder(known[name]))
    else:
        raise ValueError(f"unknown decoder {name!r}{nearest(name, sorted(known))}")


app.command("evaluate")(commands.evaluate_command)
app.command("report")(commands.report_command)
app.command("reproduce")(commands.reproduce_command)

SIMPLEX = ("greedy", "softmax", "top-k:k=2", "top-p:p=0.9", "sparsemax", "entmax", "bok", "bok:solver=exact")


def _draw_simplex(path: Path, scores: str, specs: list[str]) -> None:
    from simplexity.show.figures import save, simplex_figure

    try:
        row = torch.tensor([float(part) for part in scores.split(",")], dtype=torch.float64)
    except ValueError:
        raise ValueError(f"--scores: three numbers with commas between, got {scores!r}") from None
    if len(row) != 3:
        raise ValueError(f"--scores: three numbers with commas between, got {scores!r}")
    points = [(spec, decoder(spec).distribution(row)) for spec in specs]
    paths = [(spec, way) for spec in specs if (way := ascent_path(decoder(spec), row)) is not None]
    shown = ", ".join(f"{value:g}" for value in row.tolist())
    save(simplex_figure(points, paths, ("a", "b", "c"), f"Scores {shown} for a, b, c: where each decoder goes"), path)


def _explained(language_model: Any, text: str, specs: list[str], raw: bool, other: Any, top: int = 8) -> Any:
    """The first step after the prompt; the other model's logits stand beside it."""
    scores, context = language_model.next_scores(text, raw), None
    if other is not None:
        from simplexity.engines.other_model import Reading

        beside = Reading(other, 1).after(other.input_ids[:, :0])[0].cpu()
        context = Context(other=beside)
    return explain_step(scores, specs, lambda i: language_model.tokenizer.decode([i]), top, context)


def _as_data(name: str, chosen: Any, prompt: str, seed: int, texts: list[str], found: Any) -> dict[str, Any]:
    samples = []
    for i, text in enumerate(texts):
        length = int(found.lengths[i])
        samples.append(
            {
                "text": text,
                "tokens": found.tokens[i, :length].tolist(),
                "finish_reason": "stop" if bool(found.finished[i]) else "length",
                "log_q": found.log_q[i, :length].tolist(),
                "log_p": found.log_p[i, :length].tolist(),
                "mean_entropy": abs(found.entropy[i, :length].mean().item()),
            }
        )
    return {
        "model": name,
        "decoder": str(chosen),
        "prompt": prompt,
        "seed": seed,
        "seconds": round(found.seconds, 3),
        "not_applied": found.settings,
        "samples": samples,
    }


def _short(text: str) -> str:
    line = " ".join(text.split())
    return (line if len(line) <= 70 else line[:69] + "…").replace("$", r"\$")


if __name__ == "__main__":
    main()
