"""The parts of examples/benchmark.py: reference, errors, shapes, clock, memory, rivals."""

from __future__ import annotations

from types import SimpleNamespace

import _bench_check
import _bench_rivals
import benchmark
import numpy as np
import pytest
from _bench_cases import Case, make_inputs, named_cases, narrow, parse_case, select_cases, widen
from _bench_cases import sets_needed as sets_needed_for
from _bench_check import BUDGETS, Weights, faults, measure_errors
from _bench_device import CpuDevice, EventClock, Timing, _counting_hook
from _bench_report import Row, cpu_ratios, table_line

from la_cupy import reference as definition

# --- its reference and its errors


@pytest.mark.parametrize(
    "weights",
    [Weights(), Weights(a=0.3, b=-0.2, normalize=False), Weights(a=2.0, b=0.5, l2=False)],
)
@pytest.mark.parametrize("n", [1, 8, 29])
def test_reference_is_the_definition(
    weights: Weights, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_bench_check, "PIECE", 8)
    rng = np.random.default_rng(n)
    q, k, v, dout = rng.uniform(0.1, 1.0, (4, 3, n, 5))
    options = {
        "causal": True, "a": weights.a, "b": weights.b, "normalize": weights.normalize,
        "qk_norm": "l2" if weights.l2 else None,
    }  # fmt: skip
    out = definition.linear_attention(q, k, v, **options)[0]
    grads = definition.linear_attention_vjp(dout, q, k, v, **options)
    got = _bench_check.reference(np, q, k, v, dout, weights)
    for x, wanted in zip(got, (out, *grads[:3]), strict=True):
        np.testing.assert_allclose(x, wanted, rtol=0, atol=1e-13 * max(1, abs(wanted).max()))


def exact_results(case: Case) -> tuple[benchmark.Inputs, list[np.ndarray]]:
    inputs = make_inputs(np, case, 0)
    lead = (case.b, case.h, case.n, case.d)
    flat = [widen(x).reshape(-1, *lead[2:]) for x in (inputs.q, inputs.k, inputs.v, inputs.dout)]
    results = _bench_check.reference(np, *flat, Weights())
    return inputs, [np.array(x.reshape(lead)) for x in results]


def test_errors_see_the_last_quarter_and_nan() -> None:
    case = Case(2, 1000, 2, 4, "float32")
    inputs, results = exact_results(case)

    def found() -> list[str]:
        errors = measure_errors(np, case, inputs, tuple(results), Weights())
        return faults(errors, BUDGETS["float32"], case.n)

    assert found() == []
    results[1][..., -200:, :] *= 1 + 1e-3  # late rows of dq are small: only the norms show it
    (sentence,) = found()
    assert sentence.startswith("dq:")
    results[1][..., -200:, :] /= 1 + 1e-3
    results[3][1, 1, 7, 2] = np.nan
    (sentence,) = found()
    assert sentence.startswith("dv: ")


def test_errors_are_gathered_over_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(3, 50, 2, 4, "bfloat16")
    inputs, results = exact_results(case)
    results[0][2, 1, 3, 3] += 0.1
    whole = measure_errors(np, case, inputs, tuple(results), Weights())
    monkeypatch.setattr(_bench_check, "GROUP_ELEMENTS", case.n * case.d)
    by_head = measure_errors(np, case, inputs, tuple(results), Weights())
    assert by_head["out"].maximum == pytest.approx(0.1 / abs(results[0]).max(), rel=0.1)
    for name in whole:
        assert by_head[name].norm == pytest.approx(whole[name].norm)
        assert by_head[name].maximum == pytest.approx(whole[name].maximum)


def test_a_true_zero_is_judged_by_the_size_of_its_terms() -> None:
    case = Case(1, 1, 1, 4, "float32")  # one key: its weight cancels, so dq = dk = 0
    inputs, results = exact_results(case)
    results[1] += 1e-9
    errors = measure_errors(np, case, inputs, tuple(results), Weights())
    assert errors["dq"].maximum < 1e-8


def test_bfloat16_goes_through_its_bits() -> None:
    import ml_dtypes

    x = np.random.default_rng(0).standard_normal(1000, dtype=np.float32)
    # halfway between two bfloat16 numbers, where the even one must be taken
    x[:4] = np.array([0x3F808000, 0x3F818000, 0xBF808000, 0x3F80FFFF], np.uint32).view(np.float32)
    got = narrow(x, "bfloat16")
    np.testing.assert_array_equal(got.view(np.uint16), x.astype(ml_dtypes.bfloat16).view(np.uint16))
    np.testing.assert_array_equal(widen(got), got.astype(np.float64))


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_inputs_have_the_layout_asked_for(layout: str) -> None:
    inputs = make_inputs(np, Case(2, 5, 3, 4, "bfloat16"), 0, layout)
    assert inputs.q.shape == (2, 3, 5, 4)
    assert inputs.q.flags.c_contiguous == (layout == "bhnd")
    assert inputs.nbytes == 4 * 2 * 5 * 3 * 4 * 2


# --- shapes, roofs, rows


def test_shapes_by_name_and_by_size() -> None:
    chosen = select_cases("1x2x3x4:float16,quick,1x2x3x4:float16", "gpu", quick=False)
    assert chosen == [Case(1, 2, 3, 4, "float16"), *named_cases()["quick"]]
    assert select_cases(None, "gpu", quick=False) == named_cases()["baselines"]
    assert {case.b * case.n for case in named_cases()["sweep"]} == {2**18}
    assert all(parse_case(str(case)) == case for case in chosen)
    for text in ("baseline", "1x2x3:float32", "0x1x1x1:float32", "1x2x3x4", "1x2x3x4:int8"):
        with pytest.raises(ValueError, match="of a shape is|a shape is written"):
            parse_case(text)


def test_roof_ratio_is_that_of_the_published_baselines() -> None:
    case = Case(8, 4096, 16, 128, "bfloat16")
    row = Row.of("x", case, 4.27e12, Timing(0.915, 9.0), Timing(3.234, 20.0), 15 * 2**27, {})
    assert round(row.fwd_roof or 0, 3) == 0.137 and round(row.both_roof or 0, 3) == 0.107
    assert row.peak_units == 15.0
    line = "| x | 8 | 4096 | 16 | 128 | bfloat16 | 0.915 | 3.234 | 0.137 | 0.107 | 15.00 | 9 | 20 | - | - |"
    assert table_line(row) == line
    assert table_line(Row("x", 1, 2, 3, 4, "float32", fault="off")).count("|") == line.count("|")


def test_enough_sets_to_leave_the_l2() -> None:
    small, large = Case(1, 128, 16, 128, "bfloat16"), Case(8, 4096, 16, 128, "bfloat16")
    assert sets_needed_for(large, 60 * 2**20) == 2
    assert sets_needed_for(small, 60 * 2**20) == 16
    assert sets_needed_for(small, 4 * small.unit_bytes) == 3


def test_cpu_ratios_compare_within_one_run() -> None:
    rows = [
        Row("numpy softmax", 1, 4096, 8, 64, "float32", fwd_ms=100.0),
        Row("la_cupy", 1, 8192, 8, 64, "float32", fwd_ms=10.0),
        Row("la_cupy", 1, 16384, 8, 64, "float32", fwd_ms=20.0),
    ]
    assert cpu_ratios(rows) == {
        "softmax at N=4096 scaled to N=16384, over la_cupy": 80.0,
        "la_cupy at N=16384 over N=8192": 2.0,
    }
    assert cpu_ratios([]) == {}


# --- the clock


class SimulatedMarks:
    """A device that works through a queue while the host's time goes on by itself."""

    def __init__(self, call_ms: float, host_ms: float) -> None:
        self.call_s, self.host_s = call_ms / 1e3, host_ms / 1e3
        self.now = self.device_free = 0.0
        self.spins: list[float] = []

    def _queue(self, seconds: float) -> None:
        self.device_free = max(self.device_free, self.now) + seconds

    def call(self, _: int) -> object:
        self.now += self.host_s
        self._queue(self.call_s)
        return object()

    def spin(self, seconds: float) -> None:
        self.spins.append(seconds)
        self._queue(seconds)

    def record(self) -> float:
        return max(self.device_free, self.now)

    def reached(self, event: float) -> bool:
        return self.now >= event

    def milliseconds(self, start: float, stop: float) -> float:
        return 1e3 * (stop - start)

    def synchronize(self) -> None:
        self.now = max(self.now, self.device_free)

    def clock(self) -> EventClock:
        return EventClock(self, host_clock=lambda: self.now)


@pytest.mark.parametrize(("call_ms", "host_ms"), [(5.0, 0.01), (0.01, 3.0)])
def test_device_time_has_no_waiting_for_the_host_in_it(call_ms: float, host_ms: float) -> None:
    marks = SimulatedMarks(call_ms, host_ms)
    timing = marks.clock().measure(marks.call, 2, 30)
    assert timing.ms == pytest.approx(call_ms)
    assert timing.host_us == pytest.approx(1e3 * host_ms)
    # a slow host is answered by longer spins, until a whole batch is queued within one
    assert (max(marks.spins) > 10 * host_ms / 1e3) and (len(set(marks.spins)) > 1) == (host_ms > 1)


def test_a_synchronous_call_is_found_out() -> None:
    marks = SimulatedMarks(1.0, 0.1)

    def call(i: int) -> None:
        marks.call(i)
        marks.synchronize()

    with pytest.raises(RuntimeError, match="is a call synchronous"):
        marks.clock().measure(call, 2, 10)


def test_results_of_as_many_calls_as_sets_stay_alive() -> None:
    marks, alive, most = SimulatedMarks(1.0, 0.01), set[int](), 0

    class Result:
        def __init__(self) -> None:
            alive.add(id(self))

        def __del__(self) -> None:
            alive.discard(id(self))

    def call(i: int) -> Result:
        nonlocal most
        marks.call(i)
        result = Result()
        most = max(most, len(alive))
        return result

    marks.clock().measure(call, 3, 20)
    assert most == 4


def test_peak_memory_counts_live_blocks() -> None:
    hook = _counting_hook(SimpleNamespace(cuda=SimpleNamespace(MemoryHook=object)))
    for size in (512, 1024, -512, 2048, -1024, -2048):
        if size > 0:
            hook.malloc_postprocess(mem_size=size, size=size, device_id=0, mem_ptr=1, pmem_id=1)
        else:
            hook.free_postprocess(mem_size=-size, device_id=0, mem_ptr=1, pmem_id=1)
    assert (hook.live, hook.peak) == (0, 3072)


def test_cpu_device_measures_peak_memory() -> None:
    device = CpuDevice(copy_bytes=2**20)
    assert device.copy_bandwidth() > 0
    peak = device.peak_extra_bytes(lambda: np.ones(10**6), 0)
    assert peak == pytest.approx(8e6, rel=0.01)


# --- the rivals


def test_numpy_softmax_is_softmax() -> None:
    case = Case(2, 40, 2, 8, "bfloat16")
    inputs, rival = make_inputs(np, case, 0), _bench_rivals.numpy_softmax()
    out = rival.forward(rival.prepare(inputs))
    assert benchmark.rival_error(np, case, inputs, rival, out) < 1e-5
    assert benchmark.rival_error(np, case, inputs, rival, out * np.float32(1.1)) > 0.05


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_is_compared_without_a_copy(dtype: str, layout: str) -> None:
    pytest.importorskip("torch")
    messages: list[str] = []
    sdpa = _bench_rivals.torch_rivals(np, messages.append)[0]
    case = Case(2, 33, 2, 8, dtype)
    inputs = make_inputs(np, case, 0, layout)
    prepared = sdpa.prepare(inputs)
    assert prepared[0].data_ptr() == inputs.q.ctypes.data
    out = sdpa.ours(sdpa.forward(prepared))
    assert benchmark.rival_error(np, case, inputs, sdpa, out) < 1e-2
    assert sdpa.both is not None and len(sdpa.both(prepared)[1]) == 3
    assert not sdpa.applies(Case(1, 131072, 1, 8, dtype))


def test_rivals_that_are_not_installed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bench_rivals.importlib.util, "find_spec", lambda name: None)
    messages: list[str] = []
    assert _bench_rivals.torch_rivals(np, messages.append) == []
    assert messages == ["not compared: torch is not installed"]


def test_a_rival_that_computes_something_else_gets_no_speed() -> None:
    wrong = _bench_rivals.Rival(
        "wrong", lambda x: x, lambda x: x.v, None, lambda x: x, Weights(normalize=False)
    )
    session = benchmark.Session(CpuDevice(), 1e9, 2, "bhnd")
    row = benchmark.rival_row(session, Case(1, 20, 1, 4, "float32"), wrong)
    assert row.fwd_ms is None and row.fault is not None and "off by" in row.fault
