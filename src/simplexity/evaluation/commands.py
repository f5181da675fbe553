"""The commands `evaluate`, `report` and `reproduce`: arguments in, progress and tables out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from simplexity.embedded import NAME
from simplexity.evaluation.local import local_writer
from simplexity.evaluation.plan import ENGINES, RunPlan, at_temperatures
from simplexity.evaluation.presets import TABLES
from simplexity.evaluation.run import Breakdown, Writer, evaluate
from simplexity.evaluation.run import Progress as Told
from simplexity.evaluation.task import Task
from simplexity.evaluation.tasks import task
from simplexity.options import DecodersOption, DeviceOption, DtypeOption, ModelOption, RawOption
from simplexity.show import terminal
from simplexity.specs import nearest

Out = Annotated[Path, typer.Option("--out", help="the run's folder; a run that was stopped goes on there")]
Samples = Annotated[int, typer.Option("-n", min=1, help="samples of each question")]
Limit = Annotated[int | None, typer.Option(min=1, help="only the first so many questions")]
Data = Annotated[Path | None, typer.Option(help="the questions, a .json or .jsonl file [default: from the hub]")]
Batch = Annotated[int | None, typer.Option(min=1, help="rows written at once [default: 32, on a GPU 128, at least n]")]
Coupled = Annotated[
    list[int] | None,
    typer.Option(
        min=1,
        metavar="SIZE",
        help="draw the samples of a question in coupled groups of so many; may be repeated, 1: independent ones too",
    ),
]
Tokens = Annotated[
    int | None, typer.Option("--max-tokens", min=1, help="tokens of an answer [default: the task's, 3072]")
]
Every = Annotated[
    int | None,
    typer.Option(min=1, help="tokens between two looks at q's entropy and temperature [default: 4, on a GPU 32]"),
]
Seed = Annotated[int, typer.Option(help="the same seed gives the same samples")]
Allow = Annotated[bool, typer.Option("--allow-code-execution", help="run the programs the model writes, in a sandbox")]
Ray = Annotated[str | None, typer.Option(help="spread over a Ray cluster: its address, auto, or local")]
Engine = Annotated[str, typer.Option(help=f"what runs the model: {' or '.join(ENGINES)}, here or on the cluster")]
Controls = Annotated[bool, typer.Option(help="a softmax as sharp as each decoder that sharpens")]


def evaluate_command(
    name: Annotated[str, typer.Option("--task", help="math500, gsm8k, humaneval, gpqa-diamond")],
    out: Out,
    specs: DecodersOption = None,
    temperatures: Annotated[
        list[float] | None, typer.Option("--temperature", help="for every decoder; may be repeated")
    ] = None,
    n: Samples = 4,
    coupled: Coupled = None,
    seed: Seed = 0,
    limit: Limit = None,
    data: Data = None,
    batch: Batch = None,
    max_tokens: Tokens = None,
    every: Every = None,
    controls: Controls = True,
    allow_code_execution: Allow = False,
    raw: RawOption = False,
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    ray: Ray = None,
    engine: Engine = ENGINES[0],
) -> None:
    """Run decoders on a task and grade every sample; stopped at any moment, it goes on where it was."""
    chosen = _task(name, allow_code_execution)
    plan = RunPlan(
        model, name, tuple(at_temperatures(list(specs or ["softmax"]), temperatures or [])), n, seed, limit,
        None if data is None else str(data), _batch(batch, n, device), max_tokens or chosen.max_new_tokens, raw, dtype,
        controls, _every(every, device), tuple(coupled or [1]), engine,
    )  # fmt: skip
    _go(plan, chosen, out, device, ray)


def reproduce_command(
    table: Annotated[str, typer.Argument(help="table1, table2 or table3 of the paper")],
    out: Out,
    n: Samples = 1,
    coupled: Coupled = None,
    seed: Seed = 0,
    limit: Limit = None,
    only: Annotated[list[str] | None, typer.Option("--task", help="only this task; may be repeated")] = None,
    data: Annotated[list[str] | None, typer.Option(help="task=file, for questions that are not from the hub")] = None,
    batch: Batch = None,
    max_tokens: Tokens = None,
    every: Every = None,
    controls: Controls = True,
    allow_code_execution: Allow = False,
    model: Annotated[
        str | None,
        typer.Option(help=f"hub name, folder or GGUF file; {NAME} is the embedded one [default: the table's own]"),
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    ray: Ray = None,
    engine: Engine = ENGINES[0],
) -> None:
    """Run a table of the paper: its decoders, temperatures and prompts; --model and --limit scale it down."""
    if table not in TABLES:
        raise ValueError(f"unknown table {table!r}{nearest(table, TABLES)}")
    preset = TABLES[table]
    for name in only or []:
        if name not in preset.tasks:
            raise ValueError(f"{table} has no task {name!r}{nearest(name, preset.tasks)}")
    files = dict(_pair(entry, preset.tasks) for entry in data or [])
    for name in only or preset.tasks:
        chosen = _task(name, allow_code_execution)
        plan = RunPlan(
            model or preset.model, name, preset.decoders, n, seed, limit, files.get(name), _batch(batch, n, device),
            max_tokens or chosen.max_new_tokens, dtype=dtype, controls=controls, every=_every(every, device),
            coupled=tuple(coupled or [1]), engine=engine,
        )  # fmt: skip
        print(f"{name}: {preset.title}")
        _go(plan, chosen, out / name, device, ray)


def report_command(
    folder: Annotated[Path, typer.Argument(help="the folder of a run, or one that holds several")],
    out: Annotated[Path | None, typer.Option(help="where to write it [default: into that folder]")] = None,
) -> None:
    """Write a run's report: Markdown, a self-contained page, and figures."""
    from simplexity.evaluation.report import write_report

    for path in write_report(folder, out or folder):
        print(f"wrote {path}")


def _task(name: str, allow_code_execution: bool) -> Task:
    chosen = task(name)
    if chosen.runs_code:
        if not allow_code_execution:
            raise ValueError(f"{name} runs programs the model writes: pass --allow-code-execution to let it")
        chosen.allow_code_execution = True
    return chosen


def _batch(batch: int | None, n: int, device: str | None) -> int:
    return max(128 if _on_gpu(device) else 32, n) if batch is None else batch


def _every(every: int | None, device: str | None) -> int:
    return every or (32 if _on_gpu(device) else 4)


def _on_gpu(device: str | None) -> bool:
    import torch

    return device != "cpu" and torch.cuda.is_available()


def _pair(entry: str, tasks: tuple[str, ...]) -> tuple[str, str]:
    name, _, file = entry.partition("=")
    if name not in tasks or not file:
        raise ValueError(f"--data: task=file with one of {', '.join(tasks)}, got {entry!r}")
    return name, file


def _go(plan: RunPlan, chosen: Task, out: Path, device: str | None, ray: str | None) -> None:
    if plan.engine == "vllm":
        if device is not None:
            raise ValueError("vLLM runs on the device it was built for: leave --device out")
        if ray is None and find_spec("vllm") is None:  # said now, before there is a folder with this plan
            raise ValueError("vLLM is not installed; get it with: pip install 'simplexity[vllm]'")
    with _bars(plan) as told:
        times = evaluate(plan, chosen, out, lambda: _writer(plan, chosen, device, ray), told)
    print(said(times))
    print(f"records are in {out}; simplexity report {out} makes the tables")


def _writer(plan: RunPlan, chosen: Task, device: str | None, ray: str | None) -> Writer:
    if ray is not None:
        from simplexity.evaluation.ray_writer import RayWriter

        return RayWriter(plan, chosen.system, ray)
    return local_writer(plan, chosen.system, device)


def said(times: Breakdown) -> str:
    """Where the seconds of a run went, in one line."""
    if not times.writing:
        return "nothing was left to do"
    shares = ", ".join(f"{name} {share:.0%}" for name, share in times.shares().items())
    swept = f"; {times.swept / times.rows:.2%} of {times.rows:,} rows swept" if times.rows else ""
    return f"{times.writing + times.waiting:.0f} s: {shares}{swept}"


@contextmanager
def _bars(plan: RunPlan) -> Iterator[Told]:
    """One bar an arm, in batches, with the time that is left."""
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), *times)
    console = terminal.console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bars: dict[str, Any] = {}

        def planned(spec: str, done: int, left: int) -> None:
            if not console.is_terminal:
                console.print(f"{spec}: {left} batches to do, {done} done")
            bars[spec] = progress.add_task(spec, total=done + left, completed=done)

        finished: Callable[[str, int], None] = lambda spec, rows: progress.advance(bars[spec])  # noqa: E731
        yield replace(Told(), planned=planned, finished=finished)
