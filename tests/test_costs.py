"""What plans predict, and what was measured."""

from __future__ import annotations

import pytest
from plans import problems
from specialisations import A100, H200

from la_cupy.plan import Plan, backward_plan, forward_plan

# Milliseconds of forward and of backward with the normalizer, bfloat16, on an H200: 2026-11-30, commit 7100ac0, or (+) the next day,
# when walks add up sums of pieces themselves. The costs were fitted to other shapes, too, but not to the second half of these; what
# it takes to add, to some of (+).
MEASURED = {
    (8, 2048, 16, 128, True): (0.0790, 0.2683),
    (8, 4096, 16, 128, True): (0.1483, 0.5010),
    (8, 4096, 16, 128, False): (0.1646, 0.4862),
    (32, 512, 16, 128, True): (0.0805, 0.3011),
    (1, 8192, 64, 128, True): (0.1970, 0.5771),  # +
    (1, 131072, 16, 128, True): (0.8129, 2.3873),
    (4, 16384, 16, 64, True): (0.2054, 0.6504),  # +
    (2, 3000, 12, 128, True): (0.0532, 0.1393),  # +
    (16, 1024, 16, 128, True): (0.0807, 0.2843),
    (1, 32768, 32, 128, True): (0.4142, 1.3134),  # +
    (3, 5000, 20, 64, True): (0.0808, 0.2493),  # +
    (64, 2048, 8, 64, True): (0.1593, 0.5918),
    (1, 65536, 8, 64, True): (0.1387, 0.3976),  # +
    (4, 8192, 16, 96, True): (0.1863, 0.5687),  # +
    (24, 777, 10, 128, True): (0.0683, 0.2380),
    (1, 20000, 40, 128, True): (0.3354, 1.0179),  # +
    (6, 6000, 16, 128, False): (0.2129, 0.6254),
}


@pytest.mark.parametrize("shape", MEASURED, ids=str)
def test_predictions_are_what_was_measured(shape: tuple[int, int, int, int, bool]) -> None:
    b, n, h, d, causal = shape
    forward, backward = problems((b, h), n, None, d, causal=causal)
    plans = forward_plan(forward, H200), backward_plan(backward, H200, has_normalizer=True)
    for plan, measured in zip(plans, MEASURED[shape], strict=True):
        assert plan.predicted_ms == pytest.approx(measured, rel=0.10)
        assert f"predicted {plan.predicted_ms:.3f} ms" in str(plan)


def plan_of(lead: tuple[int, ...], dtype: str = "bfloat16", **options: object) -> Plan:
    return forward_plan(problems(lead, 4096, None, 128, dtype=dtype, **options)[0], H200)


def test_more_work_takes_longer() -> None:
    times = [plan_of((b, 16)).predicted_ms for b in (8, 16, 32)]
    assert None not in times and times == sorted(times)
    assert times[2] / times[0] == pytest.approx(4, rel=0.1)


def test_what_is_not_known_is_not_predicted() -> None:
    """Kernels of other types and GPUs, copies of inputs."""
    assert plan_of((8, 16)).predicted_ms is not None
    for plan in (
        plan_of((8, 16), dtype="float32"),
        plan_of((8, 16), feature_map="exp"),
        forward_plan(problems((8, 16), 4096, None, 128)[0], A100),
    ):
        assert plan.predicted_ms is None and "predicted" not in str(plan)


def test_nothing_takes_no_time() -> None:
    assert plan_of((0, 16)).predicted_ms == 0
