"""The gradients on `stream` and `stream_key_value`, executed by the emulation; see test_stream.py."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest
from cases import Case, Inputs, check, make_inputs, name_results
from emulation import runner
from emulation.backend import H200, Backend
from plans import plans, record, sums
from test_kernels_emulated import Emulation
from test_stream import (
    FACTORS,
    FOUR_BLOCKS,
    ONE_BLOCK,
    SIZES,
    TWO_BLOCKS,
    a_case,
    broken,
    causal_or_not,
    far_apart,
    parts,
    scaled,
    shifted,
    ways_to_join,
)

from la_cupy import reference
from la_cupy.device import DeviceInfo
from la_cupy.kernels import QUERIES, StreamedSpec
from la_cupy.plan import Plan
from la_cupy.problem import backward_problem
from la_cupy.records import Launch, suited

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation needs g++")


def gradients(
    case: Case, x: Inputs, device: DeviceInfo = TWO_BLOCKS, order: str = "forward", **backend: Any
) -> tuple[dict[str, Any], Plan]:
    """The results of the backward pass with den made again, and how they were made."""
    emulation = Emulation(device, order=order, **backend)
    options = {**case.options, "initial_state": x.initial_state}
    problem = backward_problem(x.dout, x.q, x.k, x.v, dstate=x.dstate, **options)
    made = emulation.vjp(problem, x.dout, x.q, x.k, x.v, None, x.initial_state, x.dstate)
    return name_results(grads=made), emulation.plans[-1]


def check_gradients(case: Case, x: Inputs, results: dict[str, Any]) -> None:
    options = {**case.reference_options, "initial_state": x.initial_state}
    made = reference.linear_attention_vjp(x.dout, x.q, x.k, x.v, dstate=x.dstate, **options)
    check(case, x, results, name_results(grads=made))


def streamed(plan: Plan) -> dict[str, Launch]:
    """The launches on `stream` and `stream_key_value` that make gradients, by their roles."""
    found = [x for x in plan.launches if isinstance(x.spec, StreamedSpec) and not sums(x.spec)]
    return {x.spec.role: x for x in found if x.spec.role != "Forward"}


ROLES = {"GradQ", "GradKV"}


def run_and_check(
    case: Case, device: DeviceInfo = TWO_BLOCKS, order: str = "forward", x: Inputs | None = None
) -> dict[str, Launch]:
    """The case holds, on the kernels of this file; returns their launches."""
    x = make_inputs(case) if x is None else x
    results, plan = gradients(case, x, device, order)
    found = streamed(plan)
    assert set(found) == ROLES, str(plan)
    check_gradients(case, x, results)
    return found


# --- blocks with several parts, lengths, widths, options


@pytest.mark.parametrize("order", runner.ORDERS)
@pytest.mark.parametrize("n", [70, 130, 250])
@causal_or_not
def test_a_block_goes_from_part_to_part(causal: bool, n: int, order: str) -> None:
    """Of two, three and four chunks; more parts than are described ahead."""
    device = ONE_BLOCK if order == "forward" else TWO_BLOCKS
    case = a_case(n, lead=(5, 4), causal=causal, initial="full", dstate="full")
    for launch in run_and_check(case, device, order).values():
        assert launch.grid == device.multiprocessors and parts(launch) == 20


@pytest.mark.parametrize("n,m", [(100, 230), (230, 100), (40, 170), (170, 40), (70, 1)])
@causal_or_not
def test_queries_and_keys_of_other_lengths(causal: bool, n: int, m: int) -> None:
    case = a_case(n, m, lead=(3,), causal=causal, initial="full", dstate="full")
    x = make_inputs(case)
    results, plan = gradients(case, x, ONE_BLOCK)
    several = {"GradQ": causal or n > 64, "GradKV": causal or m > 64}  # chunks
    assert set(streamed(plan)) == {role for role in ROLES if several[role]}
    check_gradients(case, x, results)


WIDTHS = [
    (128, 128),
    (64, 64),
    (8, 8),
    (72, 80),
    (128, 104),
    (64, 128),
    (128, 40),
    (33, 17),
    (24, 9),
]


@pytest.mark.parametrize("d,e", WIDTHS)
@causal_or_not
def test_widths(causal: bool, d: int, e: int) -> None:
    """One walk makes dk and dv where D and E are padded to one width, and both have maps."""
    case = a_case(150, d=d, e=e, lead=(3,), causal=causal, initial="full", layout="fused")
    x = make_inputs(case)
    results, plan = gradients(case, x, ONE_BLOCK)
    one_walk = (d > 64) == (e > 64) and d % 8 == e % 8 == 0
    assert set(streamed(plan)) == {"GradQ"} | ({"GradKV"} if one_walk else set()), str(plan)
    check_gradients(case, x, results)


@pytest.mark.parametrize("norm", ["l2", None])
@pytest.mark.parametrize("feature_map", ["identity", "relu"])
@pytest.mark.parametrize("normalize", [False, True], ids=["", "normalised"])
@causal_or_not
def test_options(causal: bool, normalize: bool, feature_map: str, norm: str | None) -> None:
    of = {"qk_norm": norm, "feature_map": feature_map, "normalize": normalize, "b": 0.3}
    case = a_case(130, causal=causal, initial="full", dstate="full", data="positive", **of)
    x = make_inputs(case)
    results, plan = gradients(case, x)
    plain = feature_map == "identity"
    assert set(streamed(plan)) == (ROLES if plain else {"GradQ"}), str(plan)
    check_gradients(case, x, results)


@pytest.mark.parametrize("dstate", [None, "full", "shared"])
@pytest.mark.parametrize("initial", [None, "full", "shared", "wide"])
@causal_or_not
def test_states(causal: bool, initial: str | None, dstate: str | None) -> None:
    run_and_check(a_case(130, lead=(2, 2), causal=causal, initial=initial, dstate=dstate))


@pytest.mark.parametrize("data", ["biased", "mean16", "offset"])
@pytest.mark.parametrize("initial", [None, "full"])
@causal_or_not
def test_values_far_from_zero(causal: bool, data: str, initial: str | None) -> None:
    of = {"causal": causal, "initial": initial, "dstate": initial, "data": data}
    run_and_check(a_case(300, lead=(2,), **of))


FIVE_BLOCKS = DeviceInfo("five blocks", 90, 5, 232448, 233472)


@pytest.mark.parametrize("order", runner.ORDERS)
@causal_or_not
def test_a_part_takes_its_own_level(causal: bool, order: str) -> None:
    """Where each head of a block has another: bit for bit as with a block of its own."""
    case = a_case(70, d=64, e=64, lead=(5,), causal=causal, data="mean16")
    x = far_apart(make_inputs(case))
    expected, plan = gradients(case, x, FIVE_BLOCKS)
    found, _ = gradients(case, x, ONE_BLOCK, order)
    assert (
        any(launch.spec.source == "stream.cu" for launch in plan.launches if sums(launch.spec))
        != causal
    )
    for name in expected:
        assert expected[name].tobytes() == found[name].tobytes(), name


@pytest.mark.parametrize("data", ["biased", "mean16"])
@pytest.mark.parametrize("n,m", [(2500, 2500), (1500, 2300), (2300, 1500)])
@causal_or_not
def test_segments(causal: bool, n: int, m: int, data: str) -> None:
    """What the chunks of a segment add up to crosses from launch to launch."""
    case = a_case(n, m, lead=(1,), causal=causal, data=data, initial="full", dstate="full")
    for launch in run_and_check(case, H200).values():
        assert record(launch)["segments"] > 1
    for launch in run_and_check(case, ONE_BLOCK).values():
        assert record(launch)["segments"] == 1


@pytest.mark.parametrize("n,m", [(1100, 1100), (700, 900), (900, 700)])
@pytest.mark.parametrize("d,e", [(16, 24), (104, 80)])
@pytest.mark.parametrize("device", [FOUR_BLOCKS, H200], ids=lambda device: device.name)
def test_sums_of_pieces_are_added_as_scan_adds_them(
    device: DeviceInfo, d: int, e: int, n: int, m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, forwards and backwards, where the segments passed have one piece each or more."""
    case = a_case(n, m, d=d, e=e, lead=(2,), causal=True, data="mean16")
    x = make_inputs(case)
    found, expected = ways_to_join(lambda: gradients(case, x, device), monkeypatch)
    check_gradients(case, x, found[0])
    for name in expected[0]:
        assert found[0][name].tobytes() == expected[0][name].tobytes(), name


# --- sums over queries


def sum_over_queries(plan: Plan) -> Launch:
    (found,) = (x for x in plan.launches if sums(x.spec) and getattr(x.spec, "reversed", False))
    return found


def check_sums_over_queries(case: Case, x: Inputs, order: str = "forward") -> None:
    """By what they are the gradient of; on one block, in a part for each head."""
    results, plan = gradients(case, x, ONE_BLOCK, order)
    launch = sum_over_queries(plan)
    assert launch.spec.role == QUERIES and (launch.grid, parts(launch)) == (1, 5), str(plan)
    options = {**case.reference_options, "initial_state": x.initial_state}
    made = reference.linear_attention_vjp(x.dout, x.q, x.k, x.v, dstate=x.dstate, **options)
    expected = name_results(grads=made)
    check(case, x, results, expected, [name for name in expected if name.startswith("dinitial")])


@pytest.mark.parametrize("order", runner.ORDERS)
@pytest.mark.parametrize("n,m", [(250, 250), (70, 130), (130, 100), (30, 70)])
@causal_or_not
def test_sums_over_queries(causal: bool, n: int, m: int, order: str) -> None:
    case = a_case(n, m, lead=(5,), causal=causal, initial="full", dstate="full", data="mean16")
    check_sums_over_queries(case, make_inputs(case), order)


SUM_OPTIONS: dict[str, dict[str, Any]] = {
    "a": {"a": -0.3, "b": 0.0},
    "b": {"a": 0.0, "b": -0.7},
    "both": {"a": 0.4, "b": 3.0},
    "not normalised": {"normalize": False, "a": 0.4},
    "no norm": {"qk_norm": None, "b": 0.3},
    "wide": {"d": 128, "e": 104},
    "not whole": {"d": 72, "e": 80},
}


@pytest.mark.parametrize("which", SUM_OPTIONS)
@causal_or_not
def test_options_of_sums_over_queries(causal: bool, which: str) -> None:
    options = SUM_OPTIONS[which]
    case = a_case(150, lead=(5,), causal=causal, initial="full", data="positive", **options)
    check_sums_over_queries(case, make_inputs(case))


@pytest.mark.parametrize("sizes", SIZES)
def test_sums_over_queries_of_any_length(sizes: str) -> None:
    case = a_case(150, lead=(5,), causal=True, initial="full")
    check_sums_over_queries(case, scaled(case, SIZES[sizes]))


def test_sums_over_queries_of_zeros() -> None:
    case = a_case(130, lead=(5,), causal=True, initial="full", data="positive")
    check_sums_over_queries(case, zero_rows(make_inputs(case), "q"))


def test_a_plan_sums_over_queries_as_it_makes_dk_and_dv() -> None:
    """On `stream_key_value` where that is one walk or could be, else by `accumulate`."""

    def source(e: int = 64, **options: Any) -> str:
        return sum_over_queries(plans(H200, (1,), 5000, None, 64, e, **options)[1]).spec.source

    for causal in (False, True):
        assert source(causal=causal) == "stream_key_value.cu"
        assert source(72, causal=causal) == "accumulate.cu"
        for options in ({"feature_map": "relu"}, {"a": 1e5}, {"dtype": "float16"}):
            assert source(causal=causal, **options) == "accumulate.cu"
        plan = plans(H200, (1, 2), 5000, None, 64, causal=causal, kv_lead=(1, 1))[1]
        assert sum_over_queries(plan).spec.source == "accumulate.cu"


@causal_or_not
def test_gradients_of_inputs_that_broadcast(causal: bool) -> None:
    n = 130
    shapes = {"q": (2, 3, n, 16), "k": (2, 3, n, 16), "v": (1, 3, n, 24)}
    run_and_check(a_case(n, causal=causal, **shapes))
    run_and_check(a_case(n, causal=causal, **shapes | {"q": (1, 3, n, 16)}))


@causal_or_not
def test_heads_that_share_keys(causal: bool) -> None:
    """Where they are masked, only dq is made on `stream`: one walk does not sum over heads."""
    n = 130
    for kv_lead in ((1, 1), (3, 1), (1, 2)):
        k, v = (*kv_lead, n, 16), (*kv_lead, n, 24)
        case = a_case(n, q=(3, 2, n, 16), k=k, v=v, causal=causal, initial="full", dstate="full")
        x = make_inputs(case)
        results, plan = gradients(case, x)
        assert set(streamed(plan)) == ({"GradQ"} if causal else ROLES)
        check_gradients(case, x, results)


# --- extremes


@pytest.mark.parametrize("a,b", [*FACTORS, (2.0, -0.5)])
@pytest.mark.parametrize("normalize", [False, True], ids=["", "normalised"])
@causal_or_not
def test_factors(causal: bool, normalize: bool, a: float, b: float) -> None:
    if not normalize and max(abs(a), abs(b)) > 1e29:
        a, b = a * 1e-3, b * 1e-3  # the largest float is near
    data = "positive" if abs(a) < 1e-10 * abs(b) else "normal"  # else weights add up to nothing
    case = a_case(70, causal=causal, a=a, b=b, normalize=normalize, initial="full", data=data)
    x = make_inputs(case)
    results, _ = gradients(case, x)
    check_gradients(case, x, results)
    if b == 0:
        assert not results["dk"].any()
        assert not results["dq"].any() or abs(a) > 1


@pytest.mark.parametrize("sizes", SIZES)
@causal_or_not
def test_rows_of_any_length(causal: bool, sizes: str) -> None:
    case = a_case(150, lead=(2,), d=40, causal=causal, initial="full")
    x = scaled(case, SIZES[sizes])
    results, plan = gradients(case, x)
    assert set(streamed(plan)) == ROLES
    check_gradients(case, x, results)


def zero_rows(x: Inputs, which: str) -> Inputs:
    """With every third row of q or k, from the fifth on, exactly 0."""
    rows = getattr(x, which).copy()
    rows[..., 5::3, :] = 0
    return x._replace(**{which: rows})


@causal_or_not
def test_factors_and_rows_of_any_length(causal: bool) -> None:
    factors = [(1e6, -1e-6), (-1e3, 1.0), (1e-30, 1e-33), (0.0, 1e-6), (1e-6, 1e6), (1e30, 1e28)]
    factors.append((1.0, 1e-10))
    for a, b in factors:
        case = a_case(70, causal=causal, initial="full", a=a, b=b, data="positive")
        for sizes in ("longest", "shortest", "mixed"):
            x = scaled(case, SIZES[sizes])
            check_gradients(case, x, gradients(case, x)[0])


@pytest.mark.parametrize("which", ["q", "k"])
@pytest.mark.parametrize("norm", ["l2", None])
@causal_or_not
def test_rows_of_zeros(causal: bool, which: str, norm: str | None) -> None:
    """A zero vector has a zero vector for its norm, and no gradient through it."""
    case = a_case(130, causal=causal, initial="full", data="positive", qk_norm=norm)
    x = zero_rows(make_inputs(case), which)
    results, _ = gradients(case, x)
    check_gradients(case, x, results)
    if norm is not None:
        assert not results[f"d{which}"][..., 5::3, :].any()


@causal_or_not
def test_rows_that_are_not_finite_stay_in_their_head(causal: bool) -> None:
    """Also where the next part of the block has other heads."""
    case = a_case(100, lead=(5,), causal=causal, initial="full")
    x = make_inputs(case)
    expected, _ = gradients(case, x, ONE_BLOCK)
    for name, value in (("q", np.nan), ("k", np.inf), ("v", np.nan), ("dout", np.inf)):
        spoilt = getattr(x, name).copy()
        spoilt[2, 50] = value
        results, _ = gradients(case, x._replace(**{name: spoilt}), ONE_BLOCK)
        for result, found in results.items():
            others = [0, 1, 3, 4]
            assert found[others].tobytes() == expected[result][others].tobytes(), (name, result)


# --- arrays without maps


@pytest.mark.parametrize("n,initial", [(150, "full"), (1200, None)])
@pytest.mark.parametrize("which", ["q", "k", "v", "dout", "all"])
@causal_or_not
def test_arrays_off_by_an_element(causal: bool, which: str, n: int, initial: str | None) -> None:
    """What has maps by its strides, but not by its address, runs on `sweep`, with the same results."""
    adds = causal and initial is None  # up the sums of pieces, which `sweep` does not
    device = TWO_BLOCKS if initial else H200
    case = a_case(n, lead=(2,), causal=causal, initial=initial)
    x = make_inputs(case)
    names = ("q", "k", "v", "dout") if which == "all" else (which,)
    off = x._replace(**{name: shifted(getattr(x, name)) for name in names})
    results, plan = gradients(case, off, device)
    found = streamed(plan)
    assert set(found) == ROLES
    addresses = dict.fromkeys((name for x in plan.launches for _, name, _ in x.pointers), 1 << 20)
    for role, launch in found.items():
        assert suited(launch, addresses) == (launch,)
        for name in names:
            chosen = suited(launch, addresses | {name: (1 << 20) + 2})
            read = causal or (name in ("q", "dout")) == (role == "GradQ")
            assert chosen == (launch.instead if read else (launch,))
        sources = [y.spec.source for y in launch.instead]
        assert sources == ["scan.cu"] * adds + ["sweep.cu"] * (1 if role == "GradQ" else 2)
    check_gradients(case, x, results)
    aligned, _ = gradients(case, x, device)
    differ = {name for name in ("dq", "dk") if aligned[name].tobytes() != results[name].tobytes()}
    expected = {"dq", "dk"} if causal or which not in ("k", "v") else {"dk"}
    assert differ == expected, "not by another kernel"


@pytest.mark.parametrize("layout", ["swapaxes", "fused", "reversed", "unaligned"])
@causal_or_not
def test_layouts(causal: bool, layout: str) -> None:
    case = a_case(130, lead=(2, 2), causal=causal, layout=layout, initial="full", dstate="full")
    x = make_inputs(case)
    results, plan = gradients(case, x)
    if layout in ("swapaxes", "fused"):
        assert set(streamed(plan)) == ROLES
    if layout == "reversed":
        assert not streamed(plan)
        assert any("GradQ has no tensor maps" in reason for reason in plan.reasons)
        assert any("GradKV has no tensor maps" in reason for reason in plan.reasons)
    check_gradients(case, x, results)


def test_reads_stay_inside_the_inputs() -> None:
    for causal, side in ((True, "before"), (True, "behind"), (False, "before"), (False, "behind")):
        for d, n in ((16, 100), (40, 33)):
            case = a_case(n, n + 30, d=d, causal=causal, lead=(2,))
            x = make_inputs(case)
            fenced = x.map(lambda array, side=side: runner.fenced(array, side))
            expected, found = gradients(case, x)[0], gradients(case, fenced)[0]
            for name in expected:
                assert expected[name].tobytes() == found[name].tobytes(), name


# --- what a plan takes


def reasons(*shape: Any, **options: Any) -> tuple[set[str], str]:
    """The roles on `stream` in the backward pass on an H200, and the plan's reasons."""
    plan = plans(H200, *shape, **{"causal": True} | options)[1]
    return set(streamed(plan)), "\n".join(plan.reasons)


def test_a_plan_says_why_dk_and_dv_take_two_walks() -> None:
    shape = (3, 2), 300, None, 64
    assert reasons(*shape) == (ROLES, "")
    found, why = reasons(*shape, causal=False)
    assert found == ROLES and "walks" not in why
    assert reasons(*shape[:3], 72, 80)[0] == ROLES
    assert reasons(*shape[:3], 64, 80)[0] == {"GradQ"}
    assert reasons(*shape[:3], 129) == (set(), "")
    for dtype in ("float16", "float32", "float64"):
        assert reasons(*shape, dtype=dtype)[0] == set()
    found, why = reasons(*shape, feature_map="relu")
    assert found == {"GradQ"} and "two walks" in why and "feature_map='relu'" in why
    found, why = reasons(*shape, feature_map="exp")
    assert found == set() and "two walks" in why and "GradQ does not run on `stream`" in why
    found, why = reasons(*shape, kv_lead=(3, 1))
    assert found == {"GradQ"} and "two walks: one walk does not sum over heads" in why
    assert reasons(*shape, kv_lead=(3, 1), causal=False)[0] == ROLES
    found, why = reasons(*shape, a=1e4)
    assert found == set() and "one walk multiplies a and b, here 10000 and 1," in why
    assert reasons(*shape, a=1e4, qk_norm=None, b=1e4)[0] == ROLES
    found, why = reasons(*shape, a=1e4, qk_norm=None)
    assert found == set() and "one walk divides a by b, here 10000 by 1" in why
    assert reasons(*shape, a=1e4, qk_norm=None, causal=False)[0] == {"GradKV"}
    found, why = reasons((3, 2), 64, None, 64)
    assert found == set() and why.count("one chunk does not fill") == 2


# --- the tests above would notice

FAULTS: dict[str, tuple[str, str, str, str]] = {  # a role, a file, what is there, what instead
    "delta without a": ("GradQ", "gradient.cuh", r"ptx::fma\(a, s, b \* dot\)", "(b * dot)"),
    "dq along q": (
        "GradQ",
        "gradient.cuh",
        r"p.unit_norm \? along \* inverse_length \* shorter : 0.f",
        "0.f",
    ),
    "long rows of q stay long": (
        "GradQ",
        "score.cuh",
        r"scale\[half\] = scale_to_one\(length\[half\]\)",
        "",
    ),
    "keys before the chunk forgotten": ("GradQ", "gradient.cuh", r"before\[c\] \+ \(", "("),
    "the mean stays on v": ("GradQ", "score.cuh", r"half, -of_row\)", "half, 0.f)"),
    "the level stays on v": ("GradQ", "centre.cuh", r"if \(levelled\) take", "if (false) take"),
    "sums of v before the first piece": (
        "GradQ",
        "centre.cuh",
        r"slots.number\(slots.first.v_sum, ",
        "0 * slots.number(slots.first.v_sum, ",
    ),
    "pieces before the segment, not behind it": (
        "GradKV",
        "slots.cuh",
        r"kReversed \? last : 0",
        "0",
    ),
    "sums of v forgotten": ("GradQ", "centre.cuh", r"c\[0\]\[i\].x\[0\] \+ c", "c"),
    "a part begins with the sums of the last": (
        "GradQ",
        "centre.cuh",
        r"if \(now.begins\(\)\) begin",
        "if (now.ordinal == 0 && now.begins()) begin",
    ),
    "no causal mask": ("GradKV", "kv_score.cuh", r">= reach \? y", ">= reach - 99 ? y"),
    "lengths forgotten": ("GradKV", "kv_score.cuh", r"fma\(length\[half\]", "fma(1.f"),
    "delta forgotten": ("GradKV", "kv_score.cuh", r"return x - delta;", "return x;"),
    "state of one chunk": (
        "GradKV",
        "kv_state.cuh",
        r"q.across\(i, 0\), 1\)",
        "q.across(i, 0), i > 0)",
    ),
    "sum of g forgotten": ("GradKV", "kv_state.cuh", r"add\(sum_g, of_g\);", ""),
    "sum of delta q forgotten": ("GradKV", "kv_state.cuh", r"add\(sum_q, of_q\);", ""),
    "dk along k": ("GradKV", "kv_state.cuh", r"p.unit_norm \? dot.* : 0.f", "0.f"),
    "long rows of k stay long": (
        "GradKV",
        "kv_length.cuh",
        r"float scale = scale_to_one\(length\)",
        "float scale = 1.f",
    ),
    "dstate forgotten": ("GradKV", "kv_state.cuh", r"column < p.d\) sum_q", "column < 0) sum_q"),
    "rows are stored before the first": (
        "GradKV",
        "sender.cuh",
        r"\|\| span.begin > 0\) return",
        "|| false) return",
    ),
    "b forgotten": ("GradKV", "kv_supply.cuh", r"flat \? 1.f : p.b_float", "1.f"),
    "the level stays on v in keys": (
        "GradKV",
        "level.cuh",
        r"if \(!any\) return",
        "return",
    ),
    "the level stays on v where nothing is masked": (
        "GradKV",
        "kv_supply.cuh",
        r"kHasRows\) level.take",
        "kOwnRows) level.take",
    ),
    "the total of the first part": (
        "GradKV",
        "kv_state.cuh",
        r" round\(\);\n      fence",
        " if (&piece == &Pipe::piece(0)) round();\n      fence",
    ),
    "half of R for dk where nothing is masked": (
        "GradKV",
        "kv_state.cuh",
        r"group_column\(\)(\), v.along\(0, i\), i > 0\);\n    wgmma_commit)",
        r"0\1",
    ),
    "g is summed once each": (
        "Queries",
        "kv_supply.cuh",
        r"row, offset\)",
        "row, 1.f)",
    ),
    "queries are summed with delta": (
        "Queries",
        "kv_supply.cuh",
        r"row, -of_query",
        "row, of_query",
    ),
    "counts of all parts": ("Queries", "kv_supply.cuh", r"sum = 0;", ""),
    "counts without a": ("Queries", "kv_supply.cuh", r"-p.a_float \* whole", "-whole"),
    "sums of another segment": ("Queries", "pipe.cuh", r"0 : part.segment", "0 : 0"),
    "the level stays on v in sums": ("Keys", "level.cuh", r"if \(!any\) return", "return"),
}

LONG_AND_SHORT = a_case(150, lead=(2,), d=40, causal=True, data="positive")
WATCHED = (
    (
        a_case(170, 200, lead=(5,), initial="full", dstate="full", causal=True, a=4.0, b=0.7),
        ONE_BLOCK,
    ),
    (a_case(200, 170, lead=(3,), causal=True, data="biased"), ONE_BLOCK),
    (a_case(130, lead=(2,), causal=True, data="offset"), ONE_BLOCK),
    (a_case(1100, lead=(1,), causal=True, data="biased", b=0.7), ONE_BLOCK),  # by the long budgets
    (a_case(1100, lead=(1,), causal=True, data="mean16"), H200),  # in segments
    (a_case(170, 200, d=128, e=104, lead=(5,), initial="full", dstate="full"), ONE_BLOCK),
    (a_case(200, 170, lead=(3,), data="mean16"), ONE_BLOCK),
    (LONG_AND_SHORT, ONE_BLOCK),
)
"""Of which one at least must fail where a kernel is broken."""


def watched_inputs(case: Case) -> Inputs:
    return scaled(case, SIZES["mixed"]) if case is LONG_AND_SHORT else make_inputs(case)


@pytest.mark.parametrize("which", range(len(WATCHED)))
def test_what_is_watched_holds(which: int) -> None:
    case, device = WATCHED[which]
    run_and_check(case, device, x=watched_inputs(case))


class _OfRole(Backend):
    """Replaces sources for the kernels of one role, so that the others need not be built anew."""

    broken: tuple[str, Any] = "", None

    def run(self, plan: Plan, buffers: dict[str, Any]) -> None:
        role, replaced = self.broken
        of_role = any(getattr(launch.spec, "role", None) == role for launch in plan.launches)
        self.replace = replaced if of_role else None
        super().run(plan, buffers)


class Broken(Emulation, _OfRole):
    """Launch by launch, of which those of a role run broken kernels."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(fault: str) -> None:
    role, *change = FAULTS[fault]
    for case, device in WATCHED:
        emulation = Broken(device)
        emulation.broken = role, broken(*change)
        x = watched_inputs(case)
        options = {**case.options, "initial_state": x.initial_state}
        problem = backward_problem(x.dout, x.q, x.k, x.v, dstate=x.dstate, **options)
        try:
            made = emulation.vjp(problem, x.dout, x.q, x.k, x.v, None, x.initial_state, x.dstate)
            check_gradients(case, x, name_results(grads=made))
        except (AssertionError, RuntimeError) as error:
            assert "g++" not in str(error), error
            return
    pytest.fail(f"{fault}: makes no difference")
