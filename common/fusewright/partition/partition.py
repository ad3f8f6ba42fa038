"""Claims and regions: ask the backend about every op, group claimed ops into convex regions, keep those that pay."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from fusewright.graph.effects import asserts, communicates, draws, held_in_order, shared_views, writes
from fusewright.graph.spec import value_of
from fusewright.graph.verify import UNTRUSTED
from fusewright.graph.view import GraphIndex, is_projection
from fusewright.interface import Backend, Dim, OpView, Region, TensorSpec, Value, Verdict, Why, hint
from fusewright.ops import OPS, Kind
from fusewright.partition.cost import work
from fusewright.plan.order import closure
from fusewright.sizes.expr import names
from fusewright.storage import lazy, shared_elements

log = logging.getLogger(__name__)


@dataclass
class Partition:
    """Regions (op nodes in order) and the verdict on every op, claimed or not."""

    regions: list[Region]
    members: list[tuple[Node, ...]]
    verdicts: dict[int, Verdict]
    bugs: list[str] = field(default_factory=list)


_SHARED = Verdict(
    Why.NO_LOWERING, "a view of an input or of another output: eager makes it, so that memory stays shared"
)


def ask(backend: Backend, op: OpView, node: Node) -> Verdict:
    """Ask the backend about one op. Never raises: ops that the host must keep are denied here, and an exception counts as no."""
    if UNTRUSTED in node.meta:
        return Verdict(Why.NO_LOWERING, str(node.meta[UNTRUSTED]))
    if writes(node):
        return Verdict(Why.NO_LOWERING, "writes its input in place: eager keeps the order of effects")
    if draws(node):
        return Verdict(Why.NO_LOWERING, "draws random numbers: eager keeps torch's generator order")
    if asserts(node):
        return Verdict(Why.NO_LOWERING, "checks something and computes nothing: eager does it in the graph's order")
    if communicates(node):
        return Verdict(Why.NO_LOWERING, "may wait for other processes: eager keeps the order of collectives")
    for v in (*op.inputs(), *op.outs):
        if isinstance(v.spec, TensorSpec) and v.spec.rank and not v.spec.stride:
            return Verdict(Why.LAYOUT, "a sparse or opaque layout")
    if op.op in OPS and OPS[op.op].kind is not Kind.VIEW and any(_shares(v.spec) for v in op.outs):
        return Verdict(Why.LAYOUT, "a result whose elements share memory: eager's last write to each of them stays")
    if any(lazy(value_of(n)) for n in (node, *node.all_input_nodes)):
        return Verdict(Why.LAYOUT, "a view that negates or conjugates, or zeros without memory: memory is not the value")
    try:
        verdict = backend.supports(op)
    except Exception as e:  # a backend's bug must not break the user's model; it is reported
        return Verdict(Why.SUPPORTS_RAISED, f"{type(e).__name__}: {e}")
    if not isinstance(verdict, Verdict):
        return Verdict(Why.SUPPORTS_RAISED, f"supports() returned {verdict!r}, not a Verdict")
    return verdict


def _shares(spec: TensorSpec | None) -> bool:
    """Whether elements share memory, or may; of symbolic sizes, those that were traced."""
    return spec is not None and shared_elements([hint(n) for n in spec.shape], [hint(s) for s in spec.stride])


def partition(backend: Backend, index: GraphIndex, denied: Mapping[str, Verdict]) -> Partition:
    """Split the graph into regions. `denied` maps node names to the reason why an earlier round gave them back."""
    verdicts: dict[int, Verdict] = {}
    bugs: list[str] = []
    shared = frozenset() if backend.real_views else shared_views(index.graph)
    for node, view in index.ops.items():
        verdict = _SHARED if node in shared else denied.get(node.meta.get("origin", node.name))
        if verdict is None:  # not `or`: a denial is falsy
            verdict = _unbound(index, view)
        if verdict is None:
            verdict = ask(backend, view, node)
        verdicts[view.id] = verdict
        if verdict.why is Why.SUPPORTS_RAISED:
            bugs.append(f"{backend.name}.supports({view.op}) raised {verdict.detail}")
    _keep_to_one_device(index, verdicts)
    claimed = [n for n, view in index.ops.items() if verdicts[view.id]]
    regions: list[Region] = []
    members: list[tuple[Node, ...]] = []
    for group in _groups(backend, index, claimed, verdicts, bugs):
        region = make_region(index, group, f"region{len(regions)}")
        verdict = _worth(backend, region, bugs)
        if verdict:
            regions.append(region)
            members.append(group)
        else:
            verdicts.update(dict.fromkeys((op.id for op in region.ops), verdict))
    return Partition(regions, members, verdicts, bugs)


def _unbound(index: GraphIndex, op: OpView) -> Verdict | None:
    """Why no kernel can compute an op: one of its sizes is not available at run time."""
    if not index.symbolic:
        return None
    specs = [v.spec for v in (*op.inputs(), *op.outs) if v.spec is not None and v.id in index.symbolic]
    dims = (s for spec in specs for s in (*spec.shape, *spec.stride) if isinstance(s, Dim))
    for name in (n for s in dims for n in names(s.expr)):
        if name not in index.bound:
            return Verdict(Why.NO_LOWERING, f"no tensor has the size {name}")
    return None


def _keep_to_one_device(index: GraphIndex, verdicts: dict[int, Verdict]) -> None:
    """In a graph on several devices, keep only claims on the device with most of them: a kernel runs on one device."""
    if len(index.devices) < 2:
        return
    used = {
        view.id: {v.spec.device for v in (*view.inputs(), *view.outs) if v.spec is not None}
        for view in index.ops.values()
        if verdicts[view.id]
    }
    count = Counter(d for devices in used.values() for d in devices)
    if len(count) > 1:
        (main, _), *_ = count.most_common()
        verdict = Verdict(Why.DEVICE, f"the graph is on several devices, and its kernels run on {main}")
        verdicts.update({op: verdict for op, devices in used.items() if devices - {main}})


def _worth(backend: Backend, region: Region, bugs: list[str]) -> Verdict:
    if all(work(op).kind == "view" for op in region.ops):
        return Verdict(Why.UNPROFITABLE, "only views, which cost nothing in eager")
    try:
        return backend.profitable(region)
    except Exception as e:  # as in `ask`
        bugs.append(f"{backend.name}.profitable() raised {type(e).__name__}: {e}")
        return Verdict(Why.CRASHED, f"profitable() raised {type(e).__name__}: {e}")


def _groups(
    backend: Backend, index: GraphIndex, claimed: Sequence[Node], verdicts: dict[int, Verdict], bugs: list[str]
) -> list[tuple[Node, ...]]:
    try:
        asked = backend.group(index.graph_view(index.ops), frozenset(index.op_id(n) for n in claimed))
    except Exception as e:  # as in `ask`
        bugs.append(f"{backend.name}.group() raised {type(e).__name__}: {e}")
        asked = None
    if asked is None:
        return convex_groups(index, claimed, apart=not backend.shows_constants)
    groups, refused = _valid_groups(index, claimed, asked)
    bugs += [f"{backend.name}.group() gave {reason}" for reason in refused]
    taken = {n for g in groups for n in g}
    for n in claimed:
        if n not in taken:
            verdicts[index.op_id(n)] = Verdict(Why.UNPROFITABLE, "claimed, but in no group of the backend")
    return groups


def _valid_groups(
    index: GraphIndex, claimed: Sequence[Node], asked: Iterable[frozenset[int]]
) -> tuple[list[tuple[Node, ...]], list[str]]:
    """The groups that a plan can run, and why each other group was refused."""
    known = set(claimed)
    taken: set[Node] = set()
    position = {n: i for i, n in enumerate(index.graph.nodes)}
    borders = [position[n] for n in index.ops if writes(n)]
    groups: list[tuple[Node, ...]] = []
    refused = []
    for ids in asked:
        nodes = {index.node_of[i] for i in ids if i in index.node_of}
        span = [position[n] for n in nodes]
        if len(nodes) < len(ids) or not nodes <= known:
            refused.append(f"a group with an op that it did not claim: {sorted(ids)}")
        elif nodes & taken:
            refused.append(f"a group that overlaps another: {sorted(ids)}")
        elif any(min(span) < b < max(span) for b in borders):
            refused.append(f"a group across an op by which something is written in place: {sorted(ids)}")
        else:
            taken |= nodes
            groups.append(tuple(sorted(nodes, key=position.__getitem__)))
    if not wait_for_each_other(index, groups):
        return groups, refused
    good: list[tuple[Node, ...]] = []
    for g in groups:
        if wait_for_each_other(index, [*good, g]):
            refused.append(f"a group that is not convex or waits for another that waits for it: {[n.name for n in g]}")
        else:
            good.append(g)
    return good, refused


def convex_groups(index: GraphIndex, claimed: Sequence[Node], apart: bool = True) -> list[tuple[Node, ...]]:
    """Form maximal convex groups of claimed nodes, greedily in topological order. In-place writes separate groups.
    `apart`: ops that depend on weights alone form groups of their own; otherwise they join the first node that reads them.

    Each node carries the set of groups that it depends on, as a bit mask. A node may join a group only if none of its inputs
    from outside the group depends on that group; otherwise the group would wait for itself. An assertion counts as an input of
    every node after it.
    """
    wanted = set(claimed)
    joining = _joining(index, wanted) if not apart else set()
    group_of: dict[Node, int] = {}
    members: list[list[Node]] = []
    needs: list[int] = []  # group -> mask of the groups it depends on (transitively closed when read)
    reach: dict[Node, int] = {}
    first_open = 0
    asserted = 0  # mask of the groups that the assertions so far depend on
    before = held_in_order(index.graph)
    for node in index.graph.nodes:
        if node.op != "call_function":
            continue
        if is_projection(node):
            source = node.args[0]
            reach[node] = reach.get(source, 0)
            if source in group_of:
                group_of[node] = group_of[source]
            continue
        if node in group_of:  # already placed together with the ops that it is connected to
            continue
        if writes(node):
            first_open = len(members)
        inputs = node.all_input_nodes
        mask = asserted | (reach.get(before[node], 0) if node in before else 0)
        for i in inputs:
            mask |= reach.get(i, 0)
        if asserts(node):
            asserted = mask
        if node in wanted and node not in joining:
            near = _candidates(node, index.const, group_of, members, first_open)
            g = _joinable(near, inputs, group_of, reach, needs, asserted)
            if g is None:
                g = len(members)
                members.append([])
                needs.append(0)
            for made in _with_constants(node, joining):
                members[g].append(made)
                group_of[made], reach[made] = g, 1 << g
            needs[g] |= mask & ~(1 << g)
            mask |= 1 << g
        reach[node] = mask
    position = {n: k for k, n in enumerate(index.graph.nodes)}
    members.append(list(joining))  # no claimed node reads these
    return [tuple(sorted(m, key=position.__getitem__)) for m in members if m]


def _joining(index: GraphIndex, wanted: set[Node]) -> set[Node]:
    """Claimed ops that depend on weights alone and have claimed readers only, restricted to connected components made of such
    ops: no ungrouped op can then stand between them and the group that they join."""
    found = {n for n in wanted & index.const if all(u in wanted for u in _readers(n))}
    ops = {n for n in index.const if n.op == "call_function" and not is_projection(n)}
    lost: list[Any] = [n for n in ops if n not in found]
    while lost:
        n = lost.pop()
        sources = (i.args[0] if is_projection(i) else i for i in n.all_input_nodes)
        for other in (*sources, *_readers(n)):
            if other in found:
                found.discard(other)
                lost.append(other)
    return found


def _readers(node: Node) -> list[Node]:
    """The ops that read a node's results."""
    return [r for u in node.users for r in (u.users if is_projection(u) else (u,))]


def _with_constants(node: Node, joining: set[Node]) -> Iterator[Node]:
    """Yield the node and the nodes of `joining` connected to it, and remove these from `joining`. So no two groups share values
    computed from the same weights, and none waits for another because of them."""
    todo: list[Any] = [node]
    while todo:
        n = todo.pop()
        yield n
        near: list[Any] = [*n.all_input_nodes, *(n.users if n is not node else ())]
        near += [p for i in near if is_projection(i) for p in (i.args[0], *i.users)]
        for i in near:
            if i in joining:
                joining.discard(i)
                todo.append(i)


def _candidates(
    node: Node, const: frozenset[Node], group_of: Mapping[Node, int], members: Sequence[Sequence[Node]], first_open: int
) -> list[int]:
    """Groups that a node may join, the largest first, so that a lone cast of a weight does not split a chain.

    Ops that depend on weights alone run once: they share groups with each other, never with ops that run at each call.
    """
    if node in const:
        return [g for g in range(len(members) - 1, first_open - 1, -1) if members[g][0] in const][:1]
    found = {group_of[i] for i in node.all_input_nodes if i in group_of and i not in const}
    near = sorted((g for g in found if g >= first_open), key=lambda g: (len(members[g]), g), reverse=True)
    last = next((g for g in range(len(members) - 1, first_open - 1, -1) if members[g][0] not in const), None)
    return near if last is None or last in near else [*near, last]  # a node without grouped inputs joins the latest group


def _joinable(
    candidates: Iterable[int],
    inputs: Sequence[Node],
    group_of: Mapping[Node, int],
    reach: Mapping[Node, int],
    needs: Sequence[int],
    asserted: int,
) -> int | None:
    """The first of the groups that the node can join without making that group wait for itself."""
    for g in candidates:
        outside = asserted
        for i in inputs:
            if group_of.get(i) != g:
                outside |= reach.get(i, 0)
        if not closure(outside, needs) >> g & 1:
            return g
    return None


def wait_for_each_other(index: GraphIndex, groups: Sequence[Sequence[Node]]) -> bool:
    """Whether no order runs each group as a unit. That includes a single group that is not convex."""
    owner: dict[Node, object] = {n: k for k, g in enumerate(groups) for n in g}
    for n in index.graph.nodes:
        if is_projection(n):
            owner[n] = owner.get(n.args[0], n.args[0])
    needs: dict[object, set[object]] = {}
    asserted: set[object] = set()
    held = {n: (b,) for n, b in held_in_order(index.graph).items()}
    for n in index.graph.nodes:
        me = owner.get(n, n)
        needs.setdefault(me, set()).update((owner.get(i, i) for i in (*n.all_input_nodes, *held.get(n, ()))), asserted)
        if asserts(n):
            asserted = {me}
        needs[me].discard(me)
    users: dict[object, list[object]] = {k: [] for k in needs}
    for k, sources in needs.items():
        for source in sources:
            users[source].append(k)
    left = {k: len(sources) for k, sources in needs.items()}
    ready = [k for k, count in left.items() if count == 0]
    for k in ready:  # grows while being iterated
        for user in users[k]:
            left[user] -= 1
            if left[user] == 0:
                ready.append(user)
    return len(ready) < len(left)


def make_region(index: GraphIndex, nodes: Sequence[Node], name: str) -> Region:
    """Make the read-only region of some op nodes (in order)."""
    views = tuple(index.ops[n] for n in nodes)
    made = {v.id for op in views for v in op.outs}
    inputs: dict[int, Value] = {}
    for op in views:
        for v in op.inputs():
            if v.id not in made:
                inputs.setdefault(v.id, v)
    formulas = [v.dim.expr for v in inputs.values() if v.dim is not None and v.dim.expr.atom is None]
    for number in (index.numbers.get(name) for e in formulas for name in names(e)):
        if number is not None:  # kernels compute what is made of it
            inputs.setdefault(number.id, number)
    used_outside: set[int] = set()
    inside = set(nodes)
    for node in nodes:
        for user in node.users:
            if is_projection(user) and user.args[0] is node:
                if any(u not in inside for u in user.users):
                    used_outside.update(v.id for v in index.values(user))
            elif user not in inside:
                used_outside.update(v.id for v in index.values(node))
    outputs = tuple(v for op in views for v in op.outs if v.id in used_outside)
    return Region(name, views, tuple(inputs.values()), outputs, index.phase)
