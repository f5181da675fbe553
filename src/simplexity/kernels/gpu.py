"""Launching the Triton kernels: scratch memory, parameters, and the order of the launches. No host synchronisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from simplexity.coverage import curvature
from simplexity.kernels import gpu_rows
from simplexity.kernels.plans import RULES, Plan

rows: Any = gpu_rows

TILE, TILE_WARPS, ROW_WARPS = 4096, 8, 8  # the fastest of those tried on an H200
REGISTERS = 128  # a thread, where there are more rows than multiprocessors: two rows then share one
GROUP, GROUPS = rows.GROUP, rows.GROUPS
NARROW = {kind.value: sizes for kind, sizes in rows.NARROW.items()}
KINDS = {
    "softmax": 0,
    "top-k": 1,
    "top-p": 2,
    "sparsemax": 3,
    "entmax": 4,
    "bok": 5,
    "bok exact": 6,
    "two models": 7,
    "min-p": 8,
}


@dataclass(frozen=True, eq=False)
class Drawn:
    """tokens int64 `[B]` (−1 where a row cannot be solved), log q of each, a `Status`, and 1 for swept rows.

    `places`, where asked for: where in the token's interval of [0, 1) the row's number lay, float64 from 0 to 1.
    """

    tokens: Tensor
    log_q: Tensor
    status: Tensor
    swept: Tensor
    places: Tensor | None = None


def fused_draw(
    logits: Tensor,
    plan: Plan,
    seeds: Tensor | None = None,
    step: int | Tensor = 0,
    uniforms: Tensor | None = None,
    places: bool = False,
) -> Drawn:
    """One token for each row of logits `[B, V]`; q is never written.

    Drawn by one number a row: from its seed and the step, or as given in `uniforms`, float64 `[B]`.
    """
    seeds = _constant(0, torch.int64, logits.device) if seeds is None else seeds
    drawn, _ = _run(logits, plan, seeds, step, uniforms, True, places)
    return drawn


def tally(device: torch.device) -> Tensor:
    """(rows solved, those that were swept) by the kernels of a device so far, int64 `[2]`, which they add to."""
    return _made(("tally", device), lambda: torch.zeros(2, dtype=torch.int64, device=device))


def fused_distribution(
    logits: Tensor, plan: Plan, log: bool = False, out: Tensor | None = None
) -> tuple[Tensor, Drawn]:
    """q, or log q, `[B, V]` in float32; `out` may be the logits themselves, and keeps rows that cannot be solved."""
    seeds = _constant(0, torch.int64, logits.device)
    drawn, scratch = _run(logits, plan, seeds, 0, None, False)
    q = torch.empty_like(logits, dtype=torch.float32) if out is None else out
    task = _task(logits, plan)
    rows.write[(scratch.tiles, len(logits))](
        logits, logits.stride(0), *task.other, logits.shape[-1], *task.slope, *task.tau, *task.coverage,
        scratch.scalars, drawn.status, q, q.stride(0),
        KIND=task.kind, RULE=task.rule, STEPS=task.steps, TILE=scratch.tile, SCALARS=task.scalars, LOG=log,
        KEEP=out is not None, GREEDY=plan.greedy,
        num_warps=scratch.warps,
    )  # fmt: skip
    return q, drawn


@dataclass(frozen=True, eq=False)
class Task:
    """A plan as the kernels want it: tensors with their strides."""

    kind: int
    rule: int
    steps: int
    scalars: int
    slope: tuple[Tensor, int]
    tau: tuple[Tensor, int]
    other: tuple[Tensor, int]
    coverage: tuple[Tensor, int]


def _task(logits: Tensor, plan: Plan) -> Task:
    cover = plan.coverage
    tau = _parameter(plan.tau, torch.float32, logits)
    other = (logits, 0) if plan.other is None else (plan.other, plan.other.stride(0))
    if cover is None:
        slope = _parameter(plan.lam, torch.float32, logits)
        return Task(KINDS[plan.kind], 0, 0, rows.SCALARS, slope, tau, other, slope)
    numbers = (plan.lam, cover.beta, cover.draws, cover.pace, cover.beta * curvature(cover.draws))
    kind = KINDS["bok exact" if cover.steps is None else "bok"]
    steps = cover.steps or 0
    scalars = rows.SCALARS + steps + 2  # the step and the levels after the row's other numbers
    return Task(kind, RULES.index(cover.rule), steps, scalars, tau, tau, other, _table(numbers, logits))


@dataclass(frozen=True, eq=False)
class Scratch:
    """What the kernels hand each other: under 2% of float32 logits."""

    tile: int
    tiles: int
    warps: int
    scalars: Tensor


def _run(
    logits: Tensor,
    plan: Plan,
    seeds: Tensor,
    step: int | Tensor,
    uniforms: Tensor | None,
    draw: bool,
    places: bool = False,
) -> tuple[Drawn, Scratch]:
    batch, size = logits.shape
    device, task = logits.device, _task(logits, plan)
    tile = min(TILE, max(16, 1 << (size - 1).bit_length()))
    tiles = -(-size // tile)
    padded = 1 << (tiles - 1).bit_length()
    warps, row_warps = (TILE_WARPS, ROW_WARPS) if tile >= 1024 else (4, 4)
    group, groups = min(GROUP, tile), min(GROUPS, 1 << (-(-size // min(GROUP, tile)) - 1).bit_length())
    cells, per_tile = batch * tiles, tile // group
    narrow, packed = NARROW.get(task.kind, (1, 0))
    head = plan.kind not in ("softmax", "two models")
    second = cells * (plan.coverage is not None)
    maxima, sums, seconds, peaks, chosen = _tables(
        device, cells, cells, second, cells * per_tile * head, batch * groups * head
    )
    chosen = chosen.view(torch.int32)
    scalars = torch.empty(batch * task.scalars, dtype=torch.float32, device=device)
    tokens = torch.empty(batch, dtype=torch.int64, device=device)
    log_q = torch.empty(batch, dtype=torch.float32, device=device)
    status = torch.empty(batch, dtype=torch.int8, device=device)
    flags = torch.empty(batch, dtype=torch.int32, device=device)
    where = torch.empty(batch, dtype=torch.float64, device=device) if places else log_q
    p = _parameter(plan.p, torch.float64, logits)
    k = _parameter(plan.k, torch.int32, logits)
    seed, at = _parameter(seeds, torch.int64, logits), _parameter(step, torch.int64, logits)
    u = seed[0] if uniforms is None else uniforms.contiguous()
    early = _early(device)
    if batch:
        rows.tiles[(tiles, batch)](
            logits, logits.stride(0), *task.other, size, *task.slope, *task.tau, *task.coverage,
            maxima, sums, seconds, peaks,
            KIND=task.kind, TILE=tile, NT=tiles, GROUP=group, GREEDY=plan.greedy, EARLY=early,
            num_warps=warps,
        )  # fmt: skip
        rows.solve[(batch,)](
            logits, logits.stride(0), *task.other, size, *task.slope, *task.tau, *p, *k, u, *seed, *at, *task.coverage,
            maxima, sums, seconds, peaks, chosen, scalars, tokens, log_q, where, status, flags,
            tally(device),
            KIND=task.kind, RULE=task.rule, STEPS=task.steps, TILE=tile, NT=tiles, NTP=padded, NG=tiles * per_tile,
            NGP=padded * per_tile, GROUP=group, GROUPS=groups, NARROW=min(narrow, groups),
            PACK=packed if tiles * per_tile >= 2 * packed else 0, ROOM=_room(tiles * per_tile), DRAW=draw,
            SEEDED=uniforms is None, SCALARS=task.scalars, PLACES=places, GREEDY=plan.greedy,
            EARLY=early, num_warps=row_warps, **({"launch_pdl": True} if early else {}),
            **_crowded(batch, draw, device),
        )  # fmt: skip
    return Drawn(tokens, log_q, status, flags, where if places else None), Scratch(tile, tiles, warps, scalars)


def _room(cells: int) -> int:
    """How many tokens, score and id, can be written down in so many cells: a power of 2, 1 where it is not worth it."""
    return 1 << (cells // 2).bit_length() - 1 if cells >= 64 else 1


def _tables(device: torch.device, *sizes: int) -> list[Tensor]:
    """Float32 tensors in one piece of memory, each where 16 bytes begin: Triton compiles anew for one that is not."""
    rooms = [-(-size // 4) * 4 for size in sizes]
    whole = torch.empty(sum(rooms), dtype=torch.float32, device=device)
    return [room[:size] for room, size in zip(whole.split(rooms), sizes, strict=True)]


def _crowded(batch: int, draw: bool, device: torch.device) -> dict[str, int]:
    """How the row kernel is compiled for so many rows.

    Left alone it takes every register of a multiprocessor, which is fastest for one row and makes others wait. Fewer
    warps would do as well, but sum in another order: a row's draw must not depend on how many there are. Where q is
    written a µs does not matter, and compiling once instead of twice does.
    """
    if device.type != "cuda" or torch.version.hip is not None or (draw and batch <= _multiprocessors(device)):
        return {}
    return {"maxnreg": REGISTERS}


@cache
def _early(device: torch.device) -> bool:
    """Whether the row kernel can be launched while the tiles are read, and wait for them on the GPU: from Hopper on."""
    if device.type != "cuda" or torch.version.hip is not None or rows.gdc_wait is None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _parameter(value: Any, dtype: torch.dtype, logits: Tensor) -> tuple[Tensor, int]:
    """A tensor and its stride: 0 for a number that all rows share, as in a tensor that was expanded."""
    if not isinstance(value, Tensor):
        return _constant(value, dtype, logits.device), 0
    column = value.reshape(-1).to(logits.device, dtype)
    return column, 0 if len(column) == 1 else column.stride(0)


def _table(values: tuple[Any, ...], logits: Tensor) -> tuple[Tensor, int]:
    """Numbers side by side, and the stride from row to row: 0 where all rows share them."""
    if not any(isinstance(value, Tensor) for value in values):
        return _constants(values, logits.device), 0
    columns = [_parameter(value, torch.float32, logits)[0].expand(len(logits)) for value in values]
    return torch.stack(columns, -1), len(values)


def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number on the device."""
    return _made((value, dtype, device), lambda: torch.full((1,), value, dtype=dtype, device=device))


def _constants(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Numbers side by side on the device."""
    return _made((values, device), lambda: torch.cat([_constant(v, torch.float32, device) for v in values]))


MADE: dict[Any, Tensor] = {}


def _made(key: Any, make: Callable[[], Tensor]) -> Tensor:
    """A tensor made once, on the device: a copy from the host would wait for it.

    Under capture nothing is computed until the graph is replayed, so what is made then is kept for that graph alone.
    """
    if key in MADE:
        return MADE[key]
    made = make()
    if not (made.is_cuda and torch.cuda.is_current_stream_capturing()):
        MADE[key] = made
    return made
