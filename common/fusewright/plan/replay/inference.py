"""Replay: a plan of fixed shapes is recorded once on its device, and replayed as a whole at every later call.

A backend supplies a `Recorder` (`fusewright.interface`); this module decides what may be recorded and who owns which memory:

- Weights, and inputs that the plan writes, are read in place. If one of their addresses changes, or prepared constants were
  prepared again, the plan is recorded again; if that keeps happening, replay is given up.
- Other inputs are copied into buffers of the recording.
- Numbers that differ from call to call are passed to the kernels that take them, if the recorder can do that.
- What nothing recorded reads is computed at each call: draws on the host, numbers that count tokens.
- Random numbers are drawn anew by every replay, as eager draws them; such plans are neither warmed up nor measured.
- Results belong to the caller. Small ones are copied out. Large ones are made in fresh memory by the last few instructions: by the
  replay, if the recorder can give it their addresses, or after it. So a result that the caller keeps is never overwritten.

Plans that cannot be recorded, or are slower that way, run as the plain plan; the report says why. Plans that communicate are
recorded in pieces (`pieces`), whatever their time: other processes cannot know it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusewright.forms.spec import Pass
from fusewright.interface import KernelCode, Recorder
from fusewright.plan.build import Plan, written_values
from fusewright.plan.execute import codegen
from fusewright.plan.execute.opaque import mismatch
from fusewright.plan.execute.prepare import Prepared, picker, watch
from fusewright.plan.ir import Instruction, Ref, Run, reads
from fusewright.plan.memory import roots_of, storage_bytes
from fusewright.plan.replay.copies import (
    Call,
    CopiesIn,
    around,
    copier_out,
    record_with_copies,
    record_written,
    takes_numbers,
)
from fusewright.plan.replay.obstacles import (
    FEWEST,
    beside,
    communicates,
    draws,
    foreign,
    obstacle,
    passed_on,
    plan_device,
    says_it_draws,
    written_inputs,
)
from fusewright.plan.replay.pieces import Pieces, communicating, no_pieces
from fusewright.plan.replay.piecewise import Piecewise, called
from fusewright.plan.replay.recording import Recorded, shown
from fusewright.plan.verify import PLAN

LARGE = 1 << 20
"""Bytes from which a result is made in fresh memory after the replay instead of being copied out."""

MOST_WRITTEN = 32 << 20
"""Bytes of large results up to which the replay writes them: recording it takes as much memory twice, and makers of larger ones
take longer than the host."""

MOST_COPIED = 1 << 20
"""Bytes of inputs that only the makers of large results read, up to which the replay writes these: it would copy those inputs."""

MOST_LATE = 8
"""Maximum number of instructions after the replay, for large results."""

MOST_RECORDINGS = 32
"""Recordings per plan: one for each stream and set of weights (layers that share a plan)."""

MOST_UNUSED = 3
"""Replay is given up after so many recordings were replaced before their second use."""

OTHER_TENSORS = "an operator gives other tensors while it is recorded"

SLOWER = 1.03
"""A replay that takes this many times the plain plan's time is not used."""


@dataclass(frozen=True)
class Parts:
    """A plan in two parts: `head` is recorded and returns `kept`, `tail` (or None) runs after it, or is recorded too if it
    `may_write` its results where the call allocates them.

    The head takes the plan's inputs, then the results of `prepare`. The tail takes the inputs at `tail_places`, then
    `tail_rest`: ids of results of `prepare` and of values kept by the head. `copied` are the positions of inputs that are
    copied for the head, `fixed` of those that it reads in place, `numbers` of those that kernels take. `late` maps positions
    of results to positions in the tail's results; other results are copies of the values `early`.
    """

    head: Plan
    tail: Plan | None
    kept: tuple[int, ...]
    copied: tuple[int, ...]
    fixed: tuple[int, ...]
    numbers: tuple[int, ...]
    late: Mapping[int, int]
    early: tuple[int, ...]
    tail_places: tuple[int, ...]
    tail_rest: tuple[int, ...]
    may_write: bool


def divide(plan: Plan, device: str) -> Parts:
    """Split a plan that `obstacle` allows on devices of this type."""
    apart = beside(plan, device)
    late = apart | _late(plan, apart)
    first = [i for k, i in enumerate(plan.instructions) if k not in late]
    last = [i for k, i in enumerate(plan.instructions) if k in late]
    made_late = {o for i in last for o in i.outs}
    passed = passed_on(plan)
    results = {k: r.id for k, r in enumerate(plan.outputs) if isinstance(r, Ref) and k not in passed}
    wanted = {r for i in last for r in reads(i)} | {r for r in results.values() if r not in made_late}
    kept = tuple(sorted(wanted & {o for i in first for o in i.outs}))
    given = (*plan.inputs, *plan.prepare_outputs)
    part = replace(plan, prepare=[], prepare_inputs=(), prepare_outputs=())
    head = replace(part, inputs=given, outputs=tuple(map(Ref, kept)), instructions=first)
    wanted_late = {r for i in last for r in reads(i)}
    tail_places = tuple(k for k, i in enumerate(plan.inputs) if i in wanted_late)
    tail_rest = tuple(v for v in (*plan.prepare_outputs, *kept) if v in wanted_late)
    positions = [k for k, r in results.items() if r in made_late]
    tail = None
    if positions or apart:
        inputs = (*[plan.inputs[k] for k in tail_places], *tail_rest)
        outputs = tuple(plan.outputs[k] for k in positions)
        tail = replace(part, inputs=inputs, outputs=outputs, instructions=last)
    large = sum(storage_bytes(plan.specs[results[k]]) for k in positions if results[k] in plan.specs)
    read = {r for i in first for r in reads(i)}
    others = [plan.specs[i] for i in plan.inputs if i in wanted_late - read and i in plan.specs]
    copies = sum(storage_bytes(s) for s in others if not s.const)
    may_write = bool(positions) and not apart and large <= MOST_WRITTEN and copies <= MOST_COPIED
    read |= wanted_late if may_write else set()
    written = written_inputs(plan)
    used = [k for k, i in enumerate(plan.inputs) if i in read and i in plan.specs]
    numbers = tuple(k for k, i in enumerate(plan.inputs) if i in read and i in plan.scalars)
    fixed = tuple(k for k in used if plan.specs[plan.inputs[k]].const or plan.inputs[k] in written)
    copied = tuple(k for k in used if k not in fixed)
    late_places = {k: n for n, k in enumerate(positions)}
    early = tuple(r for r in results.values() if r not in made_late)
    return Parts(head, tail, kept, copied, fixed, numbers, late_places, early, tail_places, tail_rest, may_write)


def whole(plan: Plan, called: Set[int]) -> Parts:
    """A plan of which the instructions at the positions `called` are called and others recorded: `Parts` with nothing behind."""
    read = {r for k, i in enumerate(plan.instructions) if k not in called for r in reads(i)}
    written, passed = written_inputs(plan), passed_on(plan)
    tensors = [(k, v) for k, v in enumerate(plan.inputs) if v in read and v in plan.specs]
    fixed = tuple(k for k, v in tensors if plan.specs[v].const or v in written)
    results = tuple(r.id for k, r in enumerate(plan.outputs) if isinstance(r, Ref) and k not in passed)
    given = (*plan.inputs, *plan.prepare_outputs)
    outputs = tuple(map(Ref, results))
    head = replace(plan, prepare=[], prepare_inputs=(), prepare_outputs=(), inputs=given, outputs=outputs)
    return Parts(head, None, (), (), fixed, (), {}, results, (), (), False)


DIVIDE = Pass(
    "division for replay",
    "plan",
    PLAN,
    lambda plan, kernels, device: divide(plan, device),
    lambda args, parts: [replace(part, kernels=args[1]) for part in (parts.head, parts.tail) if part is not None],
)
"""`divide`, after the plan with the kernels that launches may name."""


def written_places(plan: Plan) -> frozenset[int]:
    """Positions of the inputs that a run writes."""
    written = written_inputs(plan)
    return frozenset(k for k, i in enumerate(plan.inputs) if i in written)


def _late(plan: Plan, apart: Set[int] = frozenset()) -> set[int]:
    """Positions of the instructions that make large results, and of all that depend on them. A collective keeps its place, and so
    do draws, whose order decides their numbers, what reads memory that a call overwrites, and calls of others' code, which may
    replay recordings that share memory. Those `apart` from a recording are not counted."""
    if written_inputs(plan):
        return set()
    roots = roots_of(plan.instructions)
    overwritten = {root for v in written_values(plan) for root in roots.get(v, {v})}

    def movable(i: Instruction) -> bool:
        keeps = communicates(i) or foreign(i) or says_it_draws(i)
        return not keeps and not any(overwritten & roots.get(r, {r}) for r in reads(i))

    results = [r.id for r in plan.outputs if isinstance(r, Ref) and r.id in roots]  # others are inputs, passed on
    late: set[int] = set()
    for v in dict.fromkeys(results):
        shared = any(roots[v] & roots[w] for w in results if w != v)
        if v in plan.specs and storage_bytes(plan.specs[v]) >= LARGE and not shared:
            more = late | _dependents(plan.instructions, roots[v])
            late = more if len(more) <= MOST_LATE and all(movable(plan.instructions[k]) for k in more) else late
    return late if len(plan.instructions) - len(late | apart) >= FEWEST else set()


def _dependents(instructions: Sequence[Instruction], values: set[int]) -> set[int]:
    """Positions of the instructions that make one of `values`, and of all that depend on them."""
    found: set[int] = set()
    tainted: set[int] = set()
    for k, i in enumerate(instructions):
        if values & set(i.outs) or tainted & set(reads(i)):
            found.add(k)
            tainted.update(i.outs)
    return found


@dataclass
class _Recording:
    """One recording. `same` tells whether arguments that it reads in place have not moved, and weights that constants were prepared
    from have not changed; `rest` are the tail's inputs other than arguments, None if the tail is recorded too."""

    stream: Hashable
    same: Callable[[list[Any]], bool]
    prepared: Prepared | None
    call: Call
    rest: Sequence[torch.Tensor] | None
    uses: int = 0


class Replayed(Recorded[_Recording]):
    """A plan as a callable that records itself at its first call and replays from then on."""

    shares = True

    def __init__(
        self, plan: Plan, kernels: Mapping[str, KernelCode], run: Run, recorder: Recorder, tell: Callable[[str], None],
        called: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        """`called`: positions of instructions that cannot be recorded."""
        super().__init__(run, recorder, plan_device(plan, recorder.device_type), tell)
        self.plan, self.cache = plan, codegen.prepared_of(run)
        known = {h: code.kernel for h, code in kernels.items()}
        self.parts = whole(plan, called) if called else DIVIDE(plan, known, recorder.device_type)
        self._pieces = Pieces(self.parts.head, kernels) if communicating(plan) else None
        self._called = len(called)
        self._piecewise = functools.cache(lambda: Piecewise(self.parts.head, kernels, called)) if called else None
        self._head = codegen.load(self.parts.head, kernels) if self._pieces is None and not called else run
        self._tail = codegen.load(self.parts.tail, kernels) if self.parts.tail else None
        self._fixed = picker(self.parts.fixed)
        self._passed = passed_on(plan)
        self._all_early = self._tail is None and len(self.parts.early) == len(plan.outputs)
        self._weights = [plan.inputs.index(i) for i in plan.prepare_inputs]
        self._prepare_inputs = picker(self._weights)
        self._draws = draws(self.parts.head)
        self._once = bool(written_inputs(plan)) or any(map(says_it_draws, self.parts.head.instructions))
        self._loaded = not (self._once or called) or self._pieces is not None
        self._recordings: dict[tuple[Hashable, ...], _Recording] = {}
        self._last: _Recording | None = None
        self._unused = 0

    def _recording_for(self, stream: Hashable, args: list[Any]) -> _Recording | None:
        r = self._last
        if r is None or r.stream != stream or not self._holds(r, args):
            r = self._last = self._found(stream, args)
        return r

    def _holds(self, r: _Recording, args: list[Any]) -> bool:
        """Whether a recording may be replayed for these arguments: with many weights, most of the host's time before a replay."""
        if r.prepared is None:
            return r.same(args)
        return bool(r.prepared.alive) and r.same(args) and r.prepared.same_content(self._prepare_inputs(args))

    def _found(self, stream: Hashable, args: list[Any]) -> _Recording | None:
        """Find or make the recording for these arguments; None to run the plain plan."""
        prepared = self.cache.prepared(self._prepare_inputs(args)) if self.cache is not None else None
        key = (stream, *map(torch.Tensor.data_ptr, self._fixed(args)))
        found = self._recordings.get(key)
        if found is None or found.prepared is not prepared:
            return self._recorded(key, args, prepared)
        return found

    def _results(self, r: _Recording, args: list[Any]) -> tuple[Any, ...] | None:
        made = r.call(args)
        if made is None:
            return None
        r.uses += 1
        if self._all_early:
            return tuple(made)
        if r.rest is None:
            count = len(self.parts.late)
            late, made = made[:count], made[count:]
        else:
            late = self._tail([*[args[k] for k in self.parts.tail_places], *r.rest]) if self._tail is not None else ()
        early = iter(made)
        results = []
        for k, o in enumerate(self.plan.outputs):
            if k in self.parts.late:
                results.append(late[self.parts.late[k]])
            elif k in self._passed:
                results.append(args[self._passed[k]])
            else:
                results.append(next(early) if isinstance(o, Ref) else o)
        return tuple(results)

    def _recorded(self, key: tuple[Hashable, ...], args: list[Any], prepared: Prepared | None) -> _Recording | None:
        """Make a recording for `key`; None if replay is given up, or for the first call of a plan that is not warmed up: it loads
        the kernels, which a recording may not."""
        if not self._loaded:
            self._loaded = True
            return None
        stale = self._recordings.pop(key, None)
        self._unused += stale is not None and stale.uses < 2
        if self._unused >= MOST_UNUSED:
            self._give_up("weights change at every call")
            return None
        if len(self._recordings) >= MOST_RECORDINGS:
            self._give_up(f"more than {MOST_RECORDINGS} sets of weights or addresses")
            return None
        del stale
        try:
            with self.on_device():
                made = self._record(key[0], args, prepared)
                once = self._once or self._pieces is not None  # a measurement would run it several times
                worse = "" if once else self._worse(made, args)
            if worse:
                self._give_up(worse)
                return None
        except RuntimeError as e:  # raised by torch and drivers for what cannot be recorded, and if out of memory
            self._give_up(f"recording failed: {str(e).splitlines()[0]}")
            return None
        self._recordings[key] = made
        part = self.plan if made.rest is None else self.parts.head
        count = len(part.instructions) - self._called
        self.tell(f"replayed, {count} of {len(self.plan.instructions)} instructions")
        return made

    def _worse(self, made: _Recording, args: list[Any]) -> str:
        """Why not to use a recording, or "": compare its results and its time with the plain plan."""
        kinds: list[list[Any]] = [[], []]

        def noting(way: Callable[[], Sequence[Any]], kind: list[Any]) -> Callable[[], None]:
            def run() -> None:
                results = way()
                kind[:] = kind or map(_kind, results)

            return run

        ways = (lambda: self.run(list(args)), lambda: self._results(made, args) or ())
        with torch.random.fork_rng(devices=()):  # of the host, from which the tail may draw
            plain, replayed = (self.recorder.seconds(noting(w, k)) for w, k in zip(ways, kinds, strict=True))
        made.uses = 0  # of callers
        if kinds[0] != kinds[1]:
            return OTHER_TENSORS
        return f"it is slower: {replayed * 1e3:.2f} ms against {plain * 1e3:.2f} ms" if replayed > plain * SLOWER else ""

    def _record(self, stream: Hashable, args: list[Any], prepared: Prepared | None) -> _Recording:
        constants = prepared.values if prepared is not None else ()
        with torch.inference_mode(False), torch.no_grad():
            copy_in = CopiesIn(args, self.parts.copied, numbers=self.parts.numbers)
            given, by_id = [*copy_in.given(args), *constants], dict(zip(self.plan.prepare_outputs, constants, strict=True))

            call, written = self._recorded_call(copy_in, given, by_id)
        if self._once and any(mismatch(by_id[v], self.plan.specs[v]) for v in self.parts.early if v in by_id):
            raise RuntimeError(OTHER_TENSORS)
        rest = None if written else [by_id[v] for v in self.parts.tail_rest]
        weights = self._weights if prepared is not None else ()
        same = watch(args, weights, set(self.parts.fixed).difference(weights))
        return _Recording(stream, same, prepared, shown(call, self.plan), rest)

    def _recorded_call(self, copy_in: CopiesIn, given: list[Any], by_id: dict[int, Any]) -> tuple[Call, bool]:
        """Record the head, and add the values that it keeps to `by_id`. Return the call, and whether it runs the tail too."""

        def head() -> Sequence[torch.Tensor]:
            kept: Sequence[torch.Tensor] = self._head(list(given))
            return kept

        def returned(kept: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            by_id.update(zip(self.parts.kept, kept, strict=True))
            return [by_id[v] for v in self.parts.early]

        def late(kept: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            assert self._tail is not None
            by_id.update(zip(self.parts.kept, kept, strict=True))
            places, rest = self.parts.tail_places, self.parts.tail_rest
            made: Sequence[torch.Tensor] = self._tail([*[given[k] for k in places], *[by_id[v] for v in rest]])
            return made

        if self._piecewise is not None:
            count = len(self.plan.inputs)
            pieces = self._piecewise().record(self.recorder, given[:count], given[count:], self.parts.fixed)
            return self._in_pieces(pieces), False
        warm = not self._once  # a warm-up runs the head, so skip it if that would write into inputs or draw
        if self._pieces is not None:
            kept, replay = self._pieces.record(self.recorder, given, shared=True)
            return around(copy_in, replay, copier_out(returned(kept))), False
        if self.parts.may_write and not self._draws:
            call = record_written(self.recorder, head, copy_in, returned, late, warm=warm, shared=True)
            if call is not None:
                return call, True
        made = record_with_copies(self.recorder, head, copy_in, returned, warm=warm, shared=True, draws=self._draws)
        return made[1], False

    def _in_pieces(self, replay: Call) -> Call:
        def call(args: list[Any]) -> Sequence[torch.Tensor] | None:
            with self.on_device():  # on another, pieces are not replayed
                return replay(args)

        return call

    def _give_up(self, why: str) -> None:
        super()._give_up(why)
        self._recordings.clear()
        self._last = None


def _kind(result: Any) -> Any:
    """Everything about a result except its values."""
    if not isinstance(result, torch.Tensor):
        return result
    return result.device, result.dtype, result.shape, result.stride() if result.layout is torch.strided else ()


def replayed(
    plan: Plan, kernels: Mapping[str, KernelCode], run: Run, recorder: Recorder | None, tell: Callable[[str], None]
) -> Run:
    """Return `run`, replayed by `recorder` if possible."""
    if recorder is None:
        return run
    why = obstacle(plan, recorder.device_type, numbers=takes_numbers(recorder)) or no_pieces(plan, recorder)
    apart = called(plan, recorder) if why is not None else frozenset()
    if apart is None:
        tell(f"not replayed: {why}")
        return run
    return Replayed(plan, kernels, run, recorder, tell, apart)
