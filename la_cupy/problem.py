"""What is asked for, as plain data: (arrays, options) -> frozen Problem.

Every error of a caller is raised here or in `checks` and `arrays`; what comes after may
rely on a Problem. Nothing here looks at data or pointers, so a Problem can be cached by
shapes, strides, dtypes and options, and can be made up for tests.
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from . import checks, dtypes
from .results import Array, State

GPU_WIDTH_LIMIT = 256
"""The largest D and E the CUDA kernels take; on the CPU there is no limit."""

StateLayouts = tuple["Layout", "Layout", "Layout", "Layout"]


class Options(NamedTuple):
    """All run-time options of the operator, as plain Python values."""

    causal: bool = False
    a: float = 1.0
    b: float = 1.0
    qk_norm: str | None = "l2"
    feature_map: str = "identity"
    normalize: bool = True
    precision: str = "highest"


@dataclass(frozen=True)
class Layout:
    """One array as the kernels see it, without data.

    `strides` count elements and may be 0 or negative. An axis of extent 1 has stride 0, or 1
    if it is the last and not a leading axis (as all of a state's count are).
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Problem:
    """One call of the operator or of its gradient (where `dout` is not None)."""

    options: Options
    lead: tuple[int, ...]  # broadcast(q, k, v, initial_state): leading axes of out and dout
    state_lead: tuple[int, ...]  # broadcast(k, v, initial_state): leading axes of states
    n: int
    m: int
    d: int
    e: int
    dtype: str  # promoted type of q, k, v: the type of out
    compute: str  # promoted type of q, k, v (and dout): what the arithmetic must be good for
    state_dtype: str  # of states, normalizers and sums: float64 if compute is, else float32
    q: Layout
    k: Layout
    v: Layout
    dout: Layout | None = None
    initial_state: StateLayouts | None = None
    dstate: StateLayouts | None = None

    def __hash__(self) -> int:
        # Plans are looked up by Problem on every call; hashing afresh would take microseconds.
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(
            (self.options, self.lead, self.state_lead, self.n, self.m, self.d, self.e)
            + (self.dtype, self.compute, self.q, self.k, self.v, self.dout)
            + (self.initial_state, self.dstate)
        )

    def __getstate__(self) -> dict[str, Any]:
        # The hash of a str differs between processes.
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The shape of out and dout."""
        return (*self.lead, self.n, self.e)

    @property
    def levelled(self) -> bool:
        """Whether dq and dk are made of v less a constant, which changes neither: where rows are
        divided by den. See kernels_cu/chunk/level.cuh."""
        some = self.m > 0 and self.n > 0 and prod(self.lead) > 0
        return self.dout is not None and self.options.normalize and some


def make_options(
    causal: Any = False,
    a: Any = 1.0,
    b: Any = 1.0,
    qk_norm: Any = "l2",
    feature_map: Any = "identity",
    normalize: Any = True,
    precision: Any = "highest",
) -> Options:
    """Check the options and bring them to plain Python values."""
    return Options(
        causal=checks.flag("causal", causal),
        a=checks.scalar("a", a),
        b=checks.scalar("b", b),
        qk_norm=checks.choice("qk_norm", qk_norm, checks.QK_NORMS),
        feature_map=checks.choice("feature_map", feature_map, checks.FEATURE_MAPS),
        normalize=checks.flag("normalize", normalize),
        precision=checks.choice("precision", precision, checks.PRECISIONS),
    )


def forward_problem(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: Any = False,
    a: Any = 1.0,
    b: Any = 1.0,
    qk_norm: Any = "l2",
    feature_map: Any = "identity",
    normalize: Any = True,
    precision: Any = "highest",
    initial_state: Any = None,
    out: Array | None = None,
    width_limit: int | None = None,
) -> Problem:
    """The Problem of `linear_attention`, or the ValueError or TypeError its caller deserves.

    Arrays may be anything with dtype, shape and strides (in bytes); `width_limit` bounds D
    and E where the backend does.
    """
    options = make_options(causal, a, b, qk_norm, feature_map, normalize, precision)
    problem = _problem(options, q, k, v, None, initial_state, None, width_limit)
    if out is not None:
        name = checks.dtype("out", out)
        if name != problem.dtype:
            raise ValueError(
                f"out has dtype {name}, but the result of q, k and v has {problem.dtype}: "
                f"make out with dtype {problem.dtype}"
            )
        checks.exact_shape("out", out, problem.out_shape, "the result's shape")
        checks.single_writes("out", out)
        checks.strides("out", out)
    return problem


def backward_problem(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    normalizer: Array | None = None,
    causal: Any = False,
    a: Any = 1.0,
    b: Any = 1.0,
    qk_norm: Any = "l2",
    feature_map: Any = "identity",
    normalize: Any = True,
    precision: Any = "highest",
    initial_state: Any = None,
    dstate: Any = None,
    width_limit: int | None = None,
) -> Problem:
    """The Problem of `linear_attention_vjp`, or the ValueError or TypeError its caller deserves."""
    options = make_options(causal, a, b, qk_norm, feature_map, normalize, precision)
    problem = _problem(options, q, k, v, dout, initial_state, dstate, width_limit)
    if normalizer is not None:
        checks.dtype("normalizer", normalizer)
        shape = (*problem.lead, problem.n)
        checks.exact_shape("normalizer", normalizer, shape, "one value per row of the result")
        checks.strides("normalizer", normalizer)
    return problem


def _problem(
    options: Options,
    q: Array,
    k: Array,
    v: Array,
    dout: Array | None,
    initial_state: Any,
    dstate: Any,
    width_limit: int | None,
) -> Problem:
    names = [checks.dtype(name, x) for name, x in (("q", q), ("k", k), ("v", v))]
    for name, x, axes in (("q", q, "N, D"), ("k", k, "M, D"), ("v", v, "M, E")):
        checks.min_ndim(name, x, axes)
    n, d = q.shape[-2:]
    m, e = v.shape[-2:]
    if k.shape[-1] != d:
        raise ValueError(
            f"q has D = {d} in its last axis and k has D = {k.shape[-1]}, but they must be equal: "
            f"q is (..., N, D), k is (..., M, D)"
        )
    if k.shape[-2] != m:
        raise ValueError(
            f"k has {k.shape[-2]} rows and v has {m}, but each key needs one value: "
            f"k is (..., M, D), v is (..., M, E)"
        )
    checks.width("q", "D", d, width_limit)
    checks.width("v", "E", e, width_limit)
    state_lead = checks.kv_lead(q, k, v)
    initial = final = None
    if initial_state is not None:
        state = checks.state_parts("initial_state", initial_state)
        initial = _state_layouts("initial_state", state)
        state_lead = checks.state_lead("initial_state", state, d, e, state_lead, extend=True)
    lead = checks.result_lead(q, state_lead)

    dtype = compute = dtypes.promote(*names)
    if dout is not None:
        compute = dtypes.promote(dtype, checks.dtype("dout", dout))
        checks.exact_shape("dout", dout, (*lead, n, e), "the shape of out")
    if dstate is not None:
        state = checks.state_parts("dstate", dstate)
        final = _state_layouts("dstate", state)
        checks.state_lead("dstate", state, d, e, state_lead, extend=False)
    checks.representable("a", options.a, compute)
    checks.representable("b", options.b, compute)
    return Problem(
        options=options,
        lead=lead,
        state_lead=state_lead,
        n=n,
        m=m,
        d=d,
        e=e,
        dtype=dtype,
        compute=compute,
        state_dtype=dtypes.state_dtype(compute),
        q=_layout("q", q),
        k=_layout("k", k),
        v=_layout("v", v),
        dout=None if dout is None else _layout("dout", dout),
        initial_state=initial,
        dstate=final,
    )


def _layout(name: str, x: Array, last_is_core: bool = True) -> Layout:
    return Layout(checks.dtype(name, x), tuple(x.shape), checks.strides(name, x, last_is_core))


def _state_layouts(name: str, state: State) -> StateLayouts:
    kv, k_sum, v_sum = (
        _layout(f"{name}.{field}", getattr(state, field)) for field in State._fields[:3]
    )
    return kv, k_sum, v_sum, _layout(f"{name}.count", state.count, last_is_core=False)
