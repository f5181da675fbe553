"""A decoder: a named way to turn scores into a problem. What is done with the problem is the same for all.

scores s  --problem-->  max <q, s> − λ·Ω(q) on C(s)  --solve-->  q  --draw-->  token
"""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from simplexity import measures, specs
from simplexity.certificate import Certificate, certify
from simplexity.context import Context
from simplexity.coupling import Codes
from simplexity.draw import ByNumber, Pick, Seeds, as_seeds, check_draw, mode, uniforms
from simplexity.kernels import OnGPU, Plan, draw_fused, draw_on_gpu, gpu_plan, log_q_fused, log_q_on_gpu, move_on_gpu
from simplexity.parameters import Rule, plain, rule_of
from simplexity.penalties import penalise
from simplexity.problem import Problem, Status, raise_for, status_of
from simplexity.rows import all_finite, as_working, block_maxima, per_row
from simplexity.solvers import Solution, Solver, find_solution
from simplexity.targets import solve_temperature

REGISTRY: dict[str, type[Decoder]] = {}


class Posed(NamedTuple):
    """The problem of some scores, and what is known about it."""

    problem: Problem
    solver: Solver | None
    status: Tensor | None  # int8 [...], a `Status`; None: the scores were checked and are sound
    peaks: Tensor | None  # block maxima of the problem's scores, where those are the scores checked


def _target(doc: str) -> Any:
    return field(default=None, kw_only=True, metadata={"rule": Rule(above=0, optional=True, doc=doc)})


def _penalty(doc: str, *aliases: str, **rule: Any) -> Any:
    made = Rule(optional=True, doc=doc, aliases=aliases, **rule)
    return field(default=None, kw_only=True, metadata={"rule": made})


@dataclass(frozen=True)
class Decoder(ABC):
    """A named family of problems. A subclass is a frozen dataclass that writes `problem`:

        @dataclass(frozen=True)
        class MinP(Decoder, name="min-p"): ...

    Its fields are its parameters. A decoder with a `temperature` also takes a target instead of it:
    `entropy` or `effective_temperature`, for which the temperature of each row is solved.

    Every decoder takes penalties: with `repetition`, `presence` or `frequency` the scores of the tokens in
    `context.tokens` are lowered first (see `penalise`), and the problem is posed on what comes out.
    """

    name: ClassVar[str] = ""
    objective: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ()
    """The fields of the context that the problem cannot be posed without: other, rewards."""
    uses: ClassVar[tuple[str, ...]] = ()
    """Those that it looks at where they are given: other, siblings."""
    knob: ClassVar[str] = "temperature"
    """The parameter that a sweep of this decoder turns."""

    entropy: float | Tensor | None = _target("solve for the temperature that gives q this entropy, in nats")
    effective_temperature: float | Tensor | None = _target(
        "solve for the temperature that makes q as sharp as this one"
    )
    repetition: float | Tensor | None = _penalty(
        "divide positive scores of tokens seen before, multiply negative ones",
        "repetition_penalty",
        "repeat_penalty",
        above=0,
    )
    presence: float | Tensor | None = _penalty("take off the scores of tokens seen before", "presence_penalty")
    frequency: float | Tensor | None = _penalty(
        "take off the scores of tokens seen before, for each time", "frequency_penalty"
    )
    last: int | Tensor | None = _penalty(
        "how many tokens, from the end, count as seen; all of them if absent", "repeat_last_n", at_least=1, whole=True
    )

    def __init_subclass__(cls, name: str = "", **rest: Any) -> None:
        super().__init_subclass__(**rest)
        for own in ("__eq__", "__hash__"):  # a dataclass would write its own, which cannot compare tensors
            if own not in cls.__dict__:
                setattr(cls, own, getattr(Decoder, own))
        if name:
            taken = REGISTRY.get(name)
            if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
                raise ValueError(f"the decoder name {name!r} is taken by {taken.__qualname__}")
            cls.name = name
            REGISTRY[name] = cls

    def __post_init__(self) -> None:
        for f in self.parameters():
            value, rule = plain(getattr(self, f.name)), rule_of(f)
            if not rule.accepts(value):
                raise ValueError(f"{self.name}: {f.name} must be {rule.expected(value)}, got {_show(value)}{rule.hint}")
            object.__setattr__(self, f.name, int(value) if rule.whole and isinstance(value, float) else value)
        self._check_target()
        self.check()

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(_same(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))

    def __hash__(self) -> int:
        # tensors of the same values have the same shape, and that is not read from a GPU
        values = (getattr(self, f.name) for f in fields(self))
        return hash((type(self), *(value.shape if isinstance(value, Tensor) else value for value in values)))

    def _check_target(self) -> None:
        targets = [name for name in ("entropy", "effective_temperature") if getattr(self, name) is not None]
        knobs = [f for f in fields(self) if f.name == "temperature"]
        if targets and not knobs:
            raise ValueError(f"{self.name}: {targets[0]} cannot be asked for, there is no temperature to solve for")
        if len(targets) > 1 or (targets and specs.differs(getattr(self, "temperature"), knobs[0].default)):  # noqa: B009
            raise ValueError(f"{self.name}: give one of temperature, entropy and effective_temperature, not several")

    def check(self) -> None:
        """Raise a ValueError where parameters do not fit each other."""

    @classmethod
    def parameters(cls) -> list[Any]:
        """The dataclass fields a user can set; targets only where there is a temperature to solve for."""
        own = [f for f in fields(cls) if f.init]
        own = [f for f in own if not f.kw_only] + [f for f in own if f.kw_only]  # what all decoders take comes last
        if any(f.name == "temperature" for f in own):
            return own
        return [f for f in own if f.name not in ("entropy", "effective_temperature")]

    @abstractmethod
    def problem(self, scores: Tensor, context: Context | None = None) -> Problem:
        """The problem this decoder poses for scores `[..., V]`. Parameters given per row arrive as `[..., 1]`."""

    @classmethod
    def reads(cls, name: str) -> bool:
        """Whether the problem depends on a field of the context: other, rewards, siblings."""
        return name in cls.needs or name in cls.uses

    def method(self, problem: Problem) -> Solver | None:
        """How the problem is to be solved; None lets `solve` choose."""
        return None

    def distribution(self, scores: Tensor, context: Context | None = None, validate: bool = True) -> Any:
        """q `[..., V]`, float32 unless the scores are float64.

        `validate=False` does not synchronise with the host and returns `(q, status)`: see `solve`.
        """
        solution = self._solution(self._posed(scores, context, validate))
        return solution.dense() if validate else (solution.dense(), solution.status)

    def log_distribution(self, scores: Tensor, context: Context | None = None, out: Tensor | None = None) -> Any:
        """(log q `[..., V]`, −inf where q = 0; a `Status` `[...]`), for engines that draw from logits themselves.

        Rows that cannot be solved are −inf throughout, or keep what `out` holds; `out` may be the scores themselves.
        Nothing is raised for a row, and nothing is read from a GPU.
        """
        if scores.is_cuda and (plan := self._gpu_plan(scores, context)) is not None:
            return log_q_on_gpu(scores.detach(), plan, out)
        if scores.device.type == "cpu":  # looking is free here, and much can be left out
            try:
                posed = self._posed(scores, context, True)
                room = out if out is not None and out.dtype == posed.problem.scores.dtype else None
                log_q = None if posed.peaks is None else log_q_fused(posed.problem, posed.solver, posed.peaks, room)
                log_q = self._solution(posed).log_dense(room) if log_q is None else log_q
                log_q = log_q if out is None or log_q is out else out.copy_(log_q)
                return log_q, torch.zeros(scores.shape[:-1], dtype=torch.int8)
            except ValueError:
                pass  # some row cannot be solved: what follows says which
        q, status = self.distribution(scores, context, validate=False)
        # a plug-in may write its own `distribution`
        status = torch.where((status == 0) & ~(q.amax(-1) > 0), Status.UNSOLVED, status).to(torch.int8)
        if out is None:
            return q.log_(), status
        return out.copy_(torch.where((status == 0).unsqueeze(-1), q.log_(), out)), status

    def sample(
        self,
        scores: Tensor,
        generator: torch.Generator | None = None,
        seeds: Seeds | None = None,
        step: int | Tensor | None = None,
        context: Context | None = None,
        validate: bool = True,
        codes: Codes | None = None,
        log_q: bool = False,
    ) -> Any:
        """One token per row, int64 `[...]`; reproducible from a generator, or from one seed per row and the step.

        Seeds and step may also stand in the context. With `codes` the rows are samples of groups that are to differ:
        each one alone is drawn from q, and the codes move on to the next token.

        `log_q=True` gives `(tokens, log q of each)`. `validate=False` does not synchronise with the host and adds the
        `Status` of each row to what is returned: one that cannot be solved gives the token −1, of log q −inf.
        """
        if context is not None:
            seeds = context.seeds if seeds is None and generator is None else seeds
            step = context.step if step is None else step
        if codes is not None and generator is not None:
            raise ValueError("give a generator or codes, not both")
        step = 0 if step is None else step
        plan = self._gpu_plan(scores, context) if scores.is_cuda else None
        if plan is not None:
            drawn = self._draw_on_gpu(scores.detach(), plan, generator, seeds, step, codes)
            if validate:
                raise_for(drawn.status)
            if codes is not None and drawn.places is not None:
                move_on_gpu(codes, drawn.places, drawn.log_q)
            tokens, logs, status = drawn.tokens, drawn.log_q if log_q else None, drawn.status
        else:
            working = as_working(scores)
            rows, device = working.shape[:-1], working.device
            if codes is None:
                by: Pick = ByNumber(uniforms(rows, device, generator, seeds, step), seeded=seeds is not None)
            else:
                by = codes.draw
            posed = self._posed(working, context, validate)
            tokens, status = self._picked(posed, by)
            logs = self._log_q_of(posed, tokens, status) if log_q else None
            tokens = _blank(tokens, status)
        found = (tokens, logs) if log_q else (tokens,)
        found = found if validate else (*found, status)
        return found if len(found) > 1 else tokens

    def mode(self, scores: Tensor, context: Context | None = None, validate: bool = True) -> Any:
        """The most probable token of each row, int64 `[...]`."""
        solution = self._solution(self._posed(scores, context, validate))
        tokens = solution.columns.tokens(mode(solution.q))
        return tokens if validate else (_blank(tokens, solution.status), solution.status)

    def certify(self, scores: Tensor, context: Context | None = None) -> Certificate:
        """How far this decoder's q is from the optimum of its problem."""
        return self._certified(scores, context)[1]

    def describe(self, scores: Tensor, context: Context | None = None) -> measures.Description:
        """Entropy, support size, KL to the model, effective temperature and gap of q, per row."""
        q, certificate = self._certified(scores, context)
        open_scores = scores if context is None else context.restrict(scores)
        entropy = measures.entropy(q)
        return measures.Description(
            entropy=entropy,
            support_size=(q > 0).sum(-1),
            kl=measures.kl_to_model(q, open_scores),
            effective_temperature=measures.effective_temperature(open_scores, entropy),
            gap=certificate.gap,
        )

    def to_json(self) -> dict[str, Any]:
        """The decoder as plain data, every parameter included; `decoder(...)` reads it back."""
        return specs.to_json(self)

    def __str__(self) -> str:
        return specs.to_text(self)

    @classmethod
    def summary(cls) -> str:
        """The first line of the docstring."""
        return (inspect.getdoc(cls) or "").split("\n")[0]

    def has_kernel(self, scores: Tensor, context: Context | None = None) -> bool:
        """Whether draws from such scores are made by a fused kernel for GPUs, which a graph can capture."""
        return scores.is_cuda and self._gpu_plan(scores, context) is not None

    def _gpu_plan(self, scores: Tensor, context: Context | None) -> Plan | None:
        """How the fused kernels would serve this decoder; None where they do not know it."""
        other = None if context is None else context.other
        special = context is not None and (context.mask is not None or (other is not None and not context.fits(scores)))
        special = special or self.entropy is not None or self.effective_temperature is not None
        special = special or self.penalises()
        special = special or (context is not None and context.rewards is not None)
        if special or scores.ndim == 0 or scores.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return None
        # what is asked does not depend on the scores
        probe = scores.new_empty((*scores.shape[:-1], 1), dtype=torch.float32)
        columns = {name: value for name, value in self.__dict__.items() if isinstance(value, Tensor)}
        decoder = self._with({name: per_row(value, probe, name) for name, value in columns.items()})
        beside = None if other is None else probe.clone()
        problem = decoder.problem(probe, None if context is None else Context(siblings=context.siblings, other=beside))
        plan = gpu_plan(scores, problem, decoder.method(problem)) if problem.scores is probe else None
        if plan is not None and plan.other is not None and other is not None:
            return replace(plan, other=other.detach().to(scores.device).contiguous())
        return plan

    def _picked(self, posed: Posed, pick: Pick) -> tuple[Tensor, Tensor | None]:
        """(tokens, status): from masses that a fused kernel leaves, or from q."""
        if posed.peaks is not None:
            tokens = draw_fused(posed.problem, posed.solver, posed.peaks, pick)
            if tokens is not None:
                return tokens, posed.status
        solution = self._solution(posed)
        return solution.columns.tokens(pick(solution.q)), solution.status

    def _log_q_of(self, posed: Posed, tokens: Tensor, status: Tensor | None) -> Tensor:
        """log q of the tokens drawn."""
        found = self._solution(posed).dense().gather(-1, tokens.unsqueeze(-1)).squeeze(-1).log_()
        return found if status is None else found.masked_fill_(status != 0, -torch.inf)

    def _draw_on_gpu(
        self,
        scores: Tensor,
        plan: Plan,
        generator: torch.Generator | None,
        seeds: Seeds | None,
        step: int | Tensor,
        codes: Codes | None,
    ) -> OnGPU:
        """By a fused kernel, from the scores as they are."""
        rows = scores.shape[:-1]
        if codes is not None:
            codes.check(rows)
            return draw_on_gpu(scores, plan, None, 0, codes.code, places=True)
        check_draw(rows, generator, seeds, step)
        if seeds is None:
            u, own = uniforms(rows, scores.device, generator).reshape(-1), None
        else:
            u, own = None, as_seeds(seeds, rows, scores.device).reshape(-1)
        return draw_on_gpu(scores, plan, own, step, u)

    def _certified(self, scores: Tensor, context: Context | None) -> tuple[Tensor, Certificate]:
        posed = self._posed(scores, context, True)
        q = self._solution(posed).dense()
        return q, certify(posed.problem, q)

    def _solution(self, posed: Posed) -> Solution:
        status = posed.status
        solution = find_solution(posed.problem, posed.solver, status is None, posed.peaks)
        if status is None or solution.status is None:
            return solution
        status = torch.where(status == 0, solution.status, status)
        return replace(solution, q=solution.q.masked_fill((status != 0).unsqueeze(-1), 0.0), status=status)

    def _posed(self, scores: Tensor, context: Context | None, validate: bool) -> Posed:
        scores = as_working(scores)
        if context is not None:
            scores = context.restrict(scores)
        if self.penalises():
            seen = None if context is None else context.tokens
            scores = penalise(scores, seen, self.repetition, self.presence, self.frequency, self.last)
        status = peaks = None
        if not validate:
            status = status_of(scores)
            scores = scores.masked_fill((status != 0).unsqueeze(-1), 0.0)  # solvable, and erased in the end
        else:
            peaks = block_maxima(scores)
            if not all_finite(peaks.amax(-1)):
                raise_for(status_of(scores))
        columns = {name: value for name, value in self.__dict__.items() if isinstance(value, Tensor)}
        decoder = self._with({name: per_row(value, scores, name) for name, value in columns.items()})
        if decoder.entropy is not None or decoder.effective_temperature is not None:
            if context is not None and (context.other is not None or context.rewards is not None):
                raise ValueError(f"{self.name}: a target cannot be solved for beside another model's logits or rewards")
            temperature, unreachable = solve_temperature(decoder, scores, context, validate)
            decoder = decoder._with({"temperature": temperature, "entropy": None, "effective_temperature": None})
            if status is None:
                raise_for(unreachable)
            else:
                status = torch.where(status == 0, unreachable, status)
        problem = decoder.problem(scores, context)
        # a decoder that poses its problem on the very scores just checked needs no second look at them
        return Posed(problem, decoder.method(problem), status, peaks if problem.scores is scores else None)

    def penalises(self) -> bool:
        """Whether the tokens so far change the scores."""
        return self.repetition is not None or self.presence is not None or self.frequency is not None

    def _with(self, values: dict[str, Any]) -> Decoder:
        """A copy with other parameters, unchecked: a check would read per-row values on the host."""
        if not values:
            return self
        clone = copy.copy(self)
        for name, value in values.items():
            object.__setattr__(clone, name, value)
        return clone


def _blank(tokens: Tensor, status: Tensor | None) -> Tensor:
    return tokens if status is None else tokens.masked_fill(status != 0, -1)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool((one.cpu() == other.cpu()).all())
    return not isinstance(one, Tensor) and not isinstance(other, Tensor) and bool(one == other)


def _show(value: Any) -> str:
    if isinstance(value, Tensor) and value.numel():
        return f"a tensor with values from {value.double().min():g} to {value.double().max():g}"
    return str(value) if isinstance(value, (int, float)) else repr(value)
