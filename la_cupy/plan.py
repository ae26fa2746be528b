"""(Problem, DeviceInfo) -> Plan: which kernels run, on what grids, with which workspaces.

Pure: a plan is made, printed and tested without a GPU. It names buffers instead of holding
them: "q", "k", "v", "dout", "den", "initial_state.kv", ... are the caller's; the results and
the workspaces are listed in it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from . import dtypes
from .device import DeviceInfo
from .layouts import Buffer
from .params import state_names
from .planner import Cut, Planner
from .problem import Layout, Problem
from .records import Launch, RowRef, Tensor


@dataclass(frozen=True)
class Reduction:
    """A result made per head for an input that was broadcast: `source` summed to `shape`."""

    source: str
    result: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Plan:
    """All that a call does on the GPU, in order."""

    problem: Problem
    device: DeviceInfo
    copies: tuple[str, ...]  # inputs whose last axis is not contiguous: copied first
    outputs: dict[str, Buffer]
    workspace: dict[str, Buffer]
    launches: tuple[Launch, ...]
    reductions: tuple[Reduction, ...]
    reasons: tuple[str, ...]

    @property
    def workspace_bytes(self) -> int:
        """Memory that the call takes besides its results, while it runs."""
        return sum(prod(b.shape) * dtypes.ITEMSIZE[b.dtype] for b in self.workspace.values())

    @property
    def predicted_ms(self) -> float | None:
        """What the launches take on an H200; None where one of them is not predicted."""
        each = [launch.microseconds for launch in self.launches]
        known = [x for x in each if x is not None]
        other = len(known) < len(each) or self.copies or self.reductions
        return None if other else sum(known) / 1e3

    def __str__(self) -> str:
        p = self.problem
        kind = "forward" if p.dout is None else "backward"
        where = f"{kind} on {self.device.name} (sm_{self.device.arch})"
        sizes = f"lead {p.lead}, N {p.n}, M {p.m}, D {p.d}, E {p.e}, arithmetic for {p.compute}"
        lines = [f"{where}: {sizes}"]
        lines += [f"  because {reason}" for reason in self.reasons]
        lines += [f"  copy {name}: its last axis is not contiguous" for name in self.copies]
        for launch in self.launches:
            spec = launch.spec
            lines.append(
                f"  launch {spec.name} on {launch.grid} blocks of {spec.threads} threads with "
                f"{spec.shared_bytes} bytes of shared memory"
            )
        lines += [f"  sum {r.source} to {r.result} {r.shape}" for r in self.reductions]
        lines.append(f"  workspace {self.workspace_bytes} bytes")
        if self.predicted_ms is not None:
            lines.append(f"  predicted {self.predicted_ms:.3f} ms, from what an H200 takes")
        return "\n".join(lines)


def forward_plan(
    problem: Problem, device: DeviceInfo, want_state: bool = False, out: Layout | None = None
) -> Plan:
    """The plan of `linear_attention`: buffers "out" and "den", and "state.kv", ... if wanted.

    `out` is the layout of the caller's array for the result, if there is one.
    """
    planner = Planner(problem, device)
    arrays = planner.arrays
    arrays.outputs["den"] = Buffer((*problem.lead, problem.n), problem.state_dtype)
    final = arrays.new_state("state") if want_state else None
    planner.forward(arrays.out(out), arrays.rows("den", problem.lead, problem.n), final)
    return _plan(planner)


def backward_plan(problem: Problem, device: DeviceInfo, has_normalizer: bool = False) -> Plan:
    """The plan of `linear_attention_vjp`: buffers "dq", "dk", "dv" and "dinitial_state.kv", ..."""
    planner = Planner(problem, device)
    p, arrays = problem, planner.arrays
    rows: dict[str, RowRef] = {}
    if p.options.normalize:
        rows["den"] = arrays.rows("den", p.lead, p.n)
        if not has_normalizer:
            arrays.workspace["den"] = Buffer((*p.lead, p.n), p.state_dtype)
            planner.forward(None, rows["den"], None)
        arrays.workspace["delta"] = Buffer((*p.lead, p.n), p.state_dtype)
        rows["delta"] = arrays.rows("delta", p.lead, p.n)
    _query_gradient(planner, rows)
    _key_gradients(planner, rows)
    return _plan(planner, (*_sums_over_heads(planner), *_sums_of_states(planner)))


def _plan(planner: Planner, reductions: tuple[Reduction, ...] = ()) -> Plan:
    return Plan(
        problem=planner.p,
        device=planner.device,
        copies=tuple(planner.arrays.copies),
        outputs=planner.arrays.outputs,
        workspace=planner.arrays.workspace,
        launches=tuple(planner.launches),
        reductions=reductions,
        reasons=tuple(planner.reasons),
    )


def _result(planner: Planner, name: str, lead: tuple[int, ...]) -> Tensor:
    """Where the gradient of input `name` is made: at `lead` heads, to be summed if it broadcasts."""
    layout, arrays = getattr(planner.p, name), planner.arrays
    own = (1,) * (len(lead) + 2 - len(layout.shape)) + layout.shape[:-2]
    if own == lead:
        arrays.outputs[f"d{name}"] = Buffer(layout.shape, layout.dtype)
        return arrays.made(f"d{name}", layout.shape, layout.dtype)
    shape = (*lead, *layout.shape[-2:])
    arrays.workspace[f"d{name}.heads"] = Buffer(shape, layout.dtype)
    return arrays.made(f"d{name}.heads", shape, layout.dtype)


def _sums_over_heads(planner: Planner) -> Iterator[Reduction]:
    """From the gradients at all heads to those of the inputs that broadcast."""
    for name in ("q", "k", "v"):
        if (source := f"d{name}.heads") in planner.arrays.workspace:
            layout = getattr(planner.p, name)
            yield Reduction(source, f"d{name}", layout.shape, layout.dtype)


def _query_gradient(planner: Planner, rows: dict[str, RowRef]) -> None:
    p, arrays = planner.p, planner.arrays
    spec = planner.spec("GradQ")
    initial = arrays.given_state("initial_state") if p.initial_state else None
    segment = planner.walk_segment(spec)
    cut = Cut(segment, initial)
    if not planner.causal:
        cut = Cut(segment, planner.total("keys", False, {}, initial, None))
    elif segment < planner.positions(True)[2] or (initial is not None and p.levelled):
        cut = planner.states("keys", False, segment, {}, initial, None, spec)
    names = ("q", "k", "v", "dout") if planner.causal else ("q", "dout")
    tensors = {name: arrays.tensor(name) for name in names} | {"dst": _result(planner, "q", p.lead)}
    planner.launches += planner.walk(spec, cut, tensors, rows)


def _key_gradients(planner: Planner, rows: dict[str, RowRef]) -> None:
    p, arrays = planner.p, planner.arrays
    specs = {"k": planner.spec("GradK"), "v": planner.spec("GradV")}
    given = arrays.given_state("dstate") if p.dstate else None
    if given is not None and p.levelled:
        given, from_caller = arrays.relevelled(given), given
        planner.relevel(from_caller, given, 1)
    total = arrays.new_state("dinitial_state") if p.initial_state else None
    both = planner.key_value_spec()
    first = both or specs["k"]
    segment = planner.walk_segment(first)
    cut = Cut(segment, given)
    if not planner.causal:
        cut = Cut(segment, planner.total("queries", True, rows, given, total))
    elif total is not None or segment < planner.positions(False)[2]:
        cut = planner.states("queries", True, segment, rows, given, total, first)
    results = {name: _result(planner, name, arrays.state_lead) for name in specs}
    read: dict[str, tuple[str, ...]] = dict.fromkeys(specs, ("q", "k", "v", "dout"))
    if not planner.causal:
        read, rows = {"k": ("v", "k"), "v": ("k",)}, {}  # of queries, the total has all
    walks: tuple[Launch, ...] = ()
    for name, spec in specs.items():
        tensors = {x: arrays.tensor(x) for x in read[name]} | {"dst": results[name]}
        walks += planner.walk(spec, cut, tensors, rows)
    if both is not None:
        tensors = {x: arrays.tensor(x) for x in read["k"]}
        tensors |= {"dst": results["k"], "second": results["v"]}
        walks = planner.stream(both, cut, tensors, rows, cut.states, instead=walks)
    planner.launches += walks
    if total is not None and p.levelled:
        planner.relevel(total, total, -1)


def _sums_of_states(planner: Planner) -> Iterator[Reduction]:
    """From the state's leading axes and type to those of the parts that were given."""
    if planner.p.initial_state is None:
        return
    for name, layout in zip(state_names("dinitial_state"), planner.p.initial_state, strict=True):
        made = planner.arrays.outputs[name]
        if (made.shape, made.dtype) != (layout.shape, layout.dtype):
            yield Reduction(name, name, layout.shape, layout.dtype)
