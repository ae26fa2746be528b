"""`stream`, executed by the emulation: many parts for a block, extreme sizes, results of any layout.

That the table of cases holds is in test_kernels_emulated.py.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from cases import DTYPES, Case, Inputs, check, make_inputs, name_results
from emulation import runner
from emulation.backend import H200
from plans import record, sums
from test_kernels_emulated import Emulation

from la_cupy import reference
from la_cupy.device import DeviceInfo
from la_cupy.kernels import ScanSpec, StreamSpec
from la_cupy.plan import Plan
from la_cupy.planner import GRANULE, Planner
from la_cupy.problem import forward_problem
from la_cupy.records import Launch, suited

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation needs g++")

causal_or_not = pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
ONE_BLOCK = DeviceInfo("one block", 90, 1, 232448, 233472)
TWO_BLOCKS = DeviceInfo("two blocks", 90, 2, 232448, 233472)


def a_case(
    n: int = 70, m: int | None = None, d: int = 16, e: int = 24, lead: Any = (2,), **of: Any
) -> Case:
    m = n if m is None else m
    shapes = {"q": (*lead, n, d), "k": (*lead, m, d), "v": (*lead, m, e)}
    return Case(f"stream-{n}-{m}-{d}-{e}", dtype="bfloat16", **{**shapes, **of})


def forward(
    case: Case,
    x: Inputs,
    device: DeviceInfo = H200,
    order: str = "forward",
    out: Any = None,
    **backend: Any,
) -> tuple[dict[str, Any], Plan]:
    """The results of the forward pass, and how they were made."""
    emulation = Emulation(device, order=order, **backend)
    options = {**case.options, "initial_state": x.initial_state}
    problem = forward_problem(x.q, x.k, x.v, out=out, **options)
    made, state, den = emulation.forward(problem, x.q, x.k, x.v, x.initial_state, out, True)
    return name_results(out=made, state=state, den=den), emulation.plans[-1]


def check_forward(case: Case, x: Inputs, results: dict[str, Any]) -> None:
    options = {**case.reference_options, "initial_state": x.initial_state}
    out, state, den = reference.linear_attention(x.q, x.k, x.v, **options)
    check(case, x, results, name_results(out=out, state=state, den=den))


def streams(plan: Plan) -> list[Launch]:
    """Those that make a result."""
    return [x for x in plan.launches if isinstance(x.spec, StreamSpec) and not sums(x.spec)]


def parts(launch: Launch) -> int:
    p = record(launch)
    return int(np.prod(p["size"][: p["outer"]])) * int(p["segments"]) * int(p["splits"])


# --- blocks with several parts


@pytest.mark.parametrize("order", runner.ORDERS)
@pytest.mark.parametrize("device", [ONE_BLOCK, TWO_BLOCKS], ids=lambda device: device.name)
@pytest.mark.parametrize("n", [70, 130, 250])
@causal_or_not
def test_a_block_goes_from_part_to_part(
    causal: bool, n: int, device: DeviceInfo, order: str
) -> None:
    """Of two, three and four chunks; more parts than are described ahead."""
    case = a_case(n, lead=(5, 4), causal=causal, initial="full")
    x = make_inputs(case)
    results, plan = forward(case, x, device, order)
    (launch,) = streams(plan)
    assert launch.grid == device.multiprocessors and parts(launch) == 20, str(plan)
    check_forward(case, x, results)


@pytest.mark.parametrize("n,m", [(100, 230), (230, 100), (40, 170), (170, 40), (1, 70), (70, 1)])
@causal_or_not
def test_parts_of_other_lengths_than_keys(causal: bool, n: int, m: int) -> None:
    case = a_case(n, m, lead=(5,), causal=causal, initial="full")
    x = make_inputs(case)
    results, plan = forward(case, x, ONE_BLOCK)
    assert bool(streams(plan)) == (causal or n > GRANULE)
    check_forward(case, x, results)


def test_heads_that_share_keys_and_segments() -> None:
    n = 2500
    case = a_case(n, q=(1, 2, n, 16), k=(1, 1, n, 16), v=(1, 1, n, 24), causal=True)
    for device in (H200, TWO_BLOCKS):
        x = make_inputs(case)
        results, plan = forward(case, x, device)
        (launch,) = streams(plan)
        assert (record(launch)["segments"] > 1) == (device is H200)
        check_forward(case, x, results)


FOUR_BLOCKS = DeviceInfo("four blocks", 90, 4, 232448, 233472)


@pytest.mark.parametrize(
    "pieces,heads,n,m,device",
    [(1, 2, 700, 900, H200), (1, 1, 900, 700, H200), (4, 2, 3000, 3000, FOUR_BLOCKS)],
)
def test_sums_of_pieces_are_added_as_scan_adds_them(
    pieces: int, heads: int, n: int, m: int, device: DeviceInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, of heads that share k and v, where a segment has one piece or more."""
    case = a_case(n, m, q=(heads, n, 16), k=(1, m, 16), v=(1, m, 24), causal=True)
    x = make_inputs(case)
    found, expected = ways_to_join(lambda: forward(case, x, device), monkeypatch)
    assert record(streams(found[1])[0])["pieces"] == pieces, str(found[1])
    check_forward(case, x, found[0])
    for name in expected[0]:
        assert found[0][name].tobytes() == expected[0][name].tobytes(), name


def ways_to_join(
    run: Callable[[], tuple[dict[str, Any], Plan]], monkeypatch: pytest.MonkeyPatch
) -> list[tuple[dict[str, Any], Plan]]:
    """What `run` returns where walks add up the sums of pieces, and where `scan` does."""
    joining, made = Planner.joining, []
    for adds in (True, False):

        def chosen(self: Planner, *of: Any, adds: bool = adds) -> tuple[float, bool]:
            return joining(self, *of)[0], adds

        monkeypatch.setattr(Planner, "joining", chosen)
        made.append(run())
        walks = [x for x in made[-1][1].launches if not sums(x.spec)]
        scans = [x for x in walks if isinstance(x.spec, ScanSpec)]
        joined = [x for x in walks if x not in scans and record(x)["segments"] > 1]
        assert joined and len(scans) == (0 if adds else len(joined))
        assert all(record(x)["adds"] == adds for x in joined)
    return made


@pytest.mark.parametrize("d,e", [(128, 128), (128, 40), (40, 128), (8, 8), (72, 104)])
@causal_or_not
def test_widths(causal: bool, d: int, e: int) -> None:
    case = a_case(150, d=d, e=e, lead=(3,), causal=causal, initial="full")
    x = make_inputs(case)
    results, plan = forward(case, x, ONE_BLOCK)
    assert streams(plan)
    check_forward(case, x, results)


@pytest.mark.parametrize("e", [128, 72])
@pytest.mark.parametrize("d", [128, 40])
def test_a_block_for_each_half_of_the_columns(d: int, e: int) -> None:
    """Where there are more blocks than heads; the state and den are whole."""
    case = a_case(200, d=d, e=e, lead=(3,), causal=True, initial="full")
    x = make_inputs(case)
    results, plan = forward(case, x, DeviceInfo("six blocks", 90, 6, 232448, 233472))
    (launch,) = streams(plan)
    assert (parts(launch), launch.grid, len(plan.launches)) == (6, 6, 1), str(plan)
    assert "a block for each half of the columns" in str(plan)
    check_forward(case, x, results)


@pytest.mark.parametrize("norm", ["l2", None])
@pytest.mark.parametrize("feature_map", ["identity", "relu"])
@pytest.mark.parametrize("normalize", [False, True], ids=["", "normalised"])
@causal_or_not
def test_options(causal: bool, normalize: bool, feature_map: str, norm: str | None) -> None:
    of = {"qk_norm": norm, "feature_map": feature_map, "normalize": normalize, "b": 0.3}
    case = a_case(130, causal=causal, initial="full", data="positive", **of)
    x = make_inputs(case)
    results, plan = forward(case, x, TWO_BLOCKS)
    assert streams(plan)
    check_forward(case, x, results)


# --- extremes

FACTORS = (
    *((0.0, 0.0), (1.0, 0.0), (-3e30, 0.0), (0.0, -1.0), (0.0, 1e-30), (0.0, 1e30)),
    *((1.0, -0.7), (-0.2, 0.37), (1e-15, 1.0), (1.0, 1e-15), (-1e15, 1.0), (1e30, -1e20)),
    *((1e-30, 1e-30), (1e16, 1.0), (1.0, 1e-30)),
)


@pytest.mark.parametrize("a,b", FACTORS)
@pytest.mark.parametrize("normalize", [False, True], ids=["", "normalised"])
@causal_or_not
def test_factors(causal: bool, normalize: bool, a: float, b: float) -> None:
    if not normalize and max(abs(a), abs(b)) > 1e29:
        a, b = a * 1e-3, b * 1e-3  # the largest float is near
    data = "positive" if abs(a) < 1e-10 * abs(b) else "normal"  # else weights add up to nothing
    case = a_case(70, causal=causal, a=a, b=b, normalize=normalize, initial="full", data=data)
    x = make_inputs(case)
    results, _ = forward(case, x)
    check_forward(case, x, results)


SIZES = {
    "short": (1e-18, 1e-20),
    "long": (1e18, 1e20),
    "shortest": (1e-30, 3e-30),
    "longest": (1e30, 3e30),
    "between": (1e-11, 1e11),
    "mixed": (1e-30, 1.0, 1e30, 0.0, 1e-18, 1e18, 1e-9, 1e9, 1e-22),
}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("normalize", [False, True], ids=["", "normalised"])
@causal_or_not
def test_rows_of_any_length(causal: bool, normalize: bool, sizes: str) -> None:
    """Where they are divided by it: rows are left as they are, and all else is as large as they are."""
    case = a_case(150, lead=(2,), d=40, causal=causal, normalize=normalize, initial="full")
    x = scaled(case, SIZES[sizes])
    results, plan = forward(case, x, TWO_BLOCKS)
    assert streams(plan)
    check_forward(case, x, results)


@causal_or_not
def test_factors_and_rows_of_any_length(causal: bool) -> None:
    for a, b in ((1e6, -1e-6), (-1e3, 1.0), (1e-30, 1e-33), (0.0, 1e-6), (1e-6, 1e6)):
        case = a_case(70, causal=causal, initial="full", a=a, b=b, data="positive")
        for sizes in ("longest", "shortest", "mixed"):
            x = scaled(case, SIZES[sizes])
            check_forward(case, x, forward(case, x)[0])


def scaled(case: Case, sizes: tuple[float, ...]) -> Inputs:
    """The inputs, with rows of q and k that are so much longer by turns."""
    x = make_inputs(case)

    def times(rows: Any, shift: int) -> Any:
        factor = np.resize(np.roll(sizes, shift), rows.shape[-2])[:, None]
        return (rows.astype(np.float64) * factor).astype(rows.dtype)

    return x._replace(q=times(x.q, 0), k=times(x.k, 1))


def far_apart(x: Inputs) -> Inputs:
    """The same, of which each of five heads has another mean of v."""
    means = np.array([0, 100, -50, 7, 300])[:, None, None]
    return x._replace(v=(x.v.astype(np.float64) + means).astype(x.v.dtype))


@causal_or_not
def test_rows_that_are_not_finite_stay_in_their_head(causal: bool) -> None:
    """Also where the next part of the block has other heads."""
    case = a_case(100, lead=(6,), causal=causal, initial="full")
    x = make_inputs(case)
    expected, _ = forward(case, x, ONE_BLOCK)
    for name, value in (("q", np.nan), ("k", np.nan), ("v", np.inf), ("k", np.inf)):
        broken = getattr(x, name).copy()
        broken[2, 50] = value
        results, _ = forward(case, x._replace(**{name: broken}), ONE_BLOCK)
        for result, found in results.items():
            others = [0, 1, 3, 4, 5]
            assert found[others].tobytes() == expected[result][others].tobytes(), (name, result)
        assert not np.isfinite(results["out"][2, 50:].astype(np.float32)).all()


# --- arrays without maps, and results

LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "odd rows": lambda shape: np.full((*shape[:-1], 37), 7, DTYPES["bfloat16"])[..., : shape[-1]],
    "backwards": lambda shape: np.full(shape, 7, DTYPES["bfloat16"])[..., ::-1, :],
    "every other row": lambda shape: np.full(
        (*shape[:-2], 2 * shape[-2], shape[-1]), 7, DTYPES["bfloat16"]
    )[..., ::2, :],
    "swapped": lambda shape: np.full(
        (shape[0], shape[2], shape[1], shape[3]), 7, DTYPES["bfloat16"]
    ).swapaxes(1, 2),
    "wider": lambda shape: np.full((*shape[:-1], 48), 7, DTYPES["bfloat16"])[..., 8:32],
    "unaligned": lambda shape: np.full((*shape[:-1], 48), 7, DTYPES["bfloat16"])[..., 9:33],
}


@pytest.mark.parametrize("device", [H200, ONE_BLOCK], ids=["segments", "whole"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n,m", [(300, 300), (300, 260), (130, 200)])
@causal_or_not
def test_out_of_the_caller(causal: bool, n: int, m: int, layout: str, device: DeviceInfo) -> None:
    case = a_case(n, m, lead=(1, 2), causal=causal)
    x = make_inputs(case)
    out = LAYOUTS[layout]((*case.lead, n, case.v[-1]))
    parent = out if out.base is None else out.base
    results, plan = forward(case, x, device, out=out)
    (launch,) = streams(plan)
    has_map = layout not in ("odd rows", "backwards")
    assert ("out" in [name for _, name, _ in launch.maps]) == has_map
    assert results["out"] is out
    check_forward(case, x, results)
    beside = parent.size - out.size
    assert (parent == 7).sum() <= beside + 3 and (parent[parent == 7]).size >= beside - 0
    if layout != "unaligned":
        expected, _ = forward(case, x, device)
        assert np.ascontiguousarray(out).tobytes() == expected["out"].tobytes()


@pytest.mark.parametrize("n,initial", [(150, "full"), (1200, None)])
@pytest.mark.parametrize("which", ["q", "k", "v", "all"])
@causal_or_not
def test_arrays_off_by_an_element(causal: bool, which: str, n: int, initial: str | None) -> None:
    """What has maps by its strides, but not by its address, runs on `sweep`, with the same results."""
    case = a_case(n, lead=(2,), causal=causal, initial=initial)
    x = make_inputs(case)
    off = {name: shifted(getattr(x, name)) for name in ("q", "k", "v") if which in (name, "all")}
    results, plan = forward(case, x._replace(**off))
    assert {launch.spec.source for launch in plan.launches} <= {"stream.cu", "scan.cu"}
    addresses = dict.fromkeys((name for x in plan.launches for _, name, _ in x.pointers), 1 << 20)
    for launch in streams(plan):
        assert suited(launch, addresses) == (launch,)
        for name in off:
            chosen = suited(launch, addresses | {name: (1 << 20) + 2})
            read = name in [buffer for _, buffer, _ in launch.maps]
            assert chosen == (launch.instead if read else (launch,))
        scanned = any(isinstance(one.spec, ScanSpec) for one in launch.instead)
        assert scanned == (causal and initial is None), "`sweep` adds nothing up"
    check_forward(case, x, results)
    aligned, _ = forward(case, x)
    if which in ("q", "all"):
        assert aligned["out"].tobytes() != results["out"].tobytes(), "not by another kernel"
    for name, found in results.items():
        one, other = (y.astype(np.float64) for y in (found, aligned[name]))
        assert abs(one - other).max() <= 0.02 * abs(other).max(), name


def shifted(x: Any) -> Any:
    """A copy that begins one element behind a multiple of 16 bytes, and ends where memory does."""
    parent = runner.fenced(np.concatenate([np.zeros(1, x.dtype), x.ravel()]))
    return parent[1:].reshape(x.shape)


def test_reads_stay_inside_the_inputs() -> None:
    for causal, side in ((True, "before"), (True, "behind"), (False, "before"), (False, "behind")):
        for d, n in ((16, 100), (16, 64), (40, 33)):
            case = a_case(n, n + 30, d=d, causal=causal, lead=(2,))
            x = make_inputs(case)
            fenced = x.map(lambda array, side=side: runner.fenced(array, side))
            expected, found = forward(case, x)[0], forward(case, fenced)[0]
            for name in expected:
                assert expected[name].tobytes() == found[name].tobytes(), name


# --- the tests above would notice

FAULTS: dict[str, tuple[str, str, str]] = {  # a file, what is there, what instead
    "no causal mask": ("score.cuh", r"n \* 8 \+ j <= reach", "true"),
    "padding counts as keys": (
        "score.cuh",
        r"if \(!own.holds\(",
        "if (false && !own.holds(",
    ),
    "squares out of range": (
        "score.cuh",
        r"if \(warp_any\(!in_range",
        "if (false && warp_any(!in_range",
    ),
    "lengths forgotten": (
        "score.cuh",
        r"factor \* \(a_over_b \* length\[half\]\)",
        "factor * a_over_b",
    ),
    "state never updated": ("state.cuh", r"sum\[0\] \+= result\[32\]", "sum[0] += 0.f"),
    "a part begins with the sums of the last": (
        "supply.cuh",
        r"if \(now.begins\(\)\) begin",
        "if (now.ordinal == 0 && now.begins()) begin",
    ),
    "its own piece counts as one before": (
        "slots.cuh",
        r"part.segment\) \* p.pieces",
        "part.segment + 1) * p.pieces",
    ),
    "one slot of several": ("state.cuh", r"i < slots.count", "i < 1"),
    "b = 0 divides": (
        "score.cuh",
        r"params.b_float == 0.f \? 1.f : params.b_float",
        "params.b_float",
    ),
    "rows are stored before the first": ("sender.cuh", r" \|\| span.begin > 0\)", ")"),
    "another head's place in a map": (
        "courier.cuh",
        r"at\[0\], at\[1\], at\[2\]\}, full",
        "at[0] + 1, at[1], at[2]}, full",
    ),
    "expects too few bytes": (
        "courier.cuh",
        r"mbarrier_arrive_expect\(full, ",
        "mbarrier_arrive_expect(full, -16 + ",
    ),
    "final state of every segment": ("pipe.cuh", r"part.last_segment\(p\)", "true"),
}


def broken(file: str, pattern: str, new: str, index: int = 0) -> dict[str, Any]:
    """For `replace`: one of what `pattern` finds in a file of kernels_cu/stream becomes `new`."""
    text = (runner.KERNELS / "stream" / file).read_text()
    found = list(re.finditer(pattern, text))
    assert found, f"{file} has no {pattern!r} any more: break its successor instead"
    begin, end = found[index].span()
    return {f"stream/{file}": [(text, text[:begin] + found[index].expand(new) + text[end:])]}


WATCHED = (
    (a_case(170, 200, lead=(5,), initial="full", causal=True), ONE_BLOCK),
    (a_case(170, lead=(5,), initial="full"), ONE_BLOCK),
    (a_case(100, 70, lead=(5,), initial="full", causal=True, b=0.0), ONE_BLOCK),
    (a_case(100, lead=(5,), causal=True, b=0.0, feature_map="relu"), ONE_BLOCK),
    (a_case(2500, lead=(1,), causal=True, data="biased"), H200),
)
"""Of which one at least must fail where the kernel is broken."""


def watch(case: Case, device: DeviceInfo, **backend: Any) -> dict[str, Any]:
    """Also into an array that has no map, and of rows that are long and short."""
    x = scaled(case, SIZES["mixed"]) if case.b == 0 else make_inputs(case)
    out = LAYOUTS["odd rows"]((*case.lead, case.q[-2], case.v[-1])) if case.b == 0 else None
    results, _ = forward(case, x, device, out=out, **backend)
    check_forward(case, x, results)
    return results


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(fault: str) -> None:
    replaced = broken(*FAULTS[fault])
    for (case, device), order in product(WATCHED, ("forward", "reverse")):
        try:
            watch(case, device, replace=replaced, order=order)
        except (AssertionError, RuntimeError) as error:
            assert "g++" not in str(error), error
            return
    pytest.fail(f"{fault}: makes no difference")
