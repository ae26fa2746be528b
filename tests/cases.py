"""One table of cases, crossed with every backend.

A backend test is three lines::

    inputs = make_inputs(case)
    results = name_results(out=..., state=..., den=..., grads=...)
    check(case, inputs, results, reference_results(case, inputs))

CASES is the table; SMALL those cheap enough for a backend that emulates every thread of a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from inputs import DTYPES, LAYOUTS, Case, Inputs, copy_with_strides, lay_out, make_inputs
from measures import BUDGETS, check, errors, name_results, reference_results

__all__ = [
    "BUDGETS",
    "BY_NAME",
    "CASES",
    "DTYPES",
    "LAYOUTS",
    "LONG",
    "SMALL",
    "Case",
    "Inputs",
    "check",
    "copy_with_strides",
    "errors",
    "lay_out",
    "make_inputs",
    "name_results",
    "reference_results",
]


@dataclass
class _Table:
    cases: list[Case] = field(default_factory=list)

    def add(self, name: str, **fields: Any) -> None:
        """A case; ``n``, ``m``, ``d``, ``e``, ``lead`` are short for the three shapes."""
        lead = fields.pop("lead", (2,))
        n = fields.pop("n", 33)
        m = fields.pop("m", n)
        d = fields.pop("d", 16)
        e = fields.pop("e", d)
        fields.setdefault("q", (*lead, n, d))
        fields.setdefault("k", (*lead, m, d))
        fields.setdefault("v", (*lead, m, e))
        self.cases.append(Case(name, **fields))


def _table() -> list[Case]:
    t = _Table()
    both = (("", False), ("causal-", True))
    kinds = ("float64", "float32", "tf32", "bfloat16", "float16")

    for prefix, causal in both:
        for kind in kinds:
            t.add(f"{prefix}{kind}", causal=causal, n=70, d=32, **_kind(kind))
            t.add(
                f"{prefix}{kind}-state",
                causal=causal,
                n=37,
                d=24,
                e=40,
                initial="full",
                dstate="full",
                **_kind(kind),
            )
        for feature_map in ("elu1", "relu", "silu", "exp"):
            for norm in ("l2", None):
                # silu's features change sign: a = 1 with norm keeps den positive, b small without
                b = 0.1 if feature_map == "silu" and norm is None else 1.0
                t.add(
                    f"{prefix}{feature_map}-{norm}",
                    causal=causal,
                    n=45,
                    feature_map=feature_map,
                    qk_norm=norm,
                    b=b,
                )
        for kind in ("bfloat16", "float16"):
            t.add(f"{prefix}elu1-{kind}", causal=causal, n=45, feature_map="elu1", **_kind(kind))
        t.add(f"{prefix}identity-None", causal=causal, n=45, qk_norm=None, b=0.03)
        t.add(
            f"{prefix}unnormalised",
            causal=causal,
            n=45,
            normalize=False,
            initial="full",
            dstate="full",
        )
        t.add(
            f"{prefix}unnormalised-bfloat16",
            causal=causal,
            n=45,
            normalize=False,
            **_kind("bfloat16"),
        )
        for a, b in ((-0.2, 0.37), (3.0, 0.37), (0.0, 0.37), (1.0, 0.0), (1.0, -0.7), (0.0, 0.0)):
            data = "positive" if a == 0 else "normal"
            for kind in ("float32", "bfloat16"):
                t.add(
                    f"{prefix}a={a}-b={b}-{kind}",
                    causal=causal,
                    n=40,
                    d=32,
                    a=a,
                    b=b,
                    data=data,
                    initial="full",
                    dstate="full",
                    **_kind(kind),
                )
        t.add(f"{prefix}N<M", causal=causal, n=7, m=70, initial="full", dstate="full")
        t.add(f"{prefix}N>M", causal=causal, n=70, m=7, dstate="full")
        t.add(f"{prefix}N>M-state", causal=causal, n=70, m=7, initial="full", dstate="full")
        t.add(f"{prefix}N=7-M=10", causal=causal, n=7, m=10, dtype="bfloat16")
        t.add(f"{prefix}N=10-M=7", causal=causal, n=10, m=7, dtype="bfloat16")
        for kind in ("float32", "bfloat16"):
            t.add(
                f"{prefix}grouped-{kind}",
                causal=causal,
                q=(2, 3, 30, 16),
                k=(2, 1, 30, 16),
                v=(2, 1, 30, 24),
                initial="full",
                dstate="full",
                **_kind(kind),
            )
        t.add(
            f"{prefix}k-v-on-different-axes",
            causal=causal,
            q=(2, 3, 20, 16),
            k=(2, 1, 20, 16),
            v=(1, 3, 20, 8),
            dstate="full",
        )
        t.add(f"{prefix}q-broadcast", causal=causal, q=(20, 16), k=(3, 1, 20, 16), v=(2, 20, 8))
        t.add(
            f"{prefix}k-broadcast",
            causal=causal,
            q=(2, 3, 20, 16),
            k=(20, 16),
            v=(2, 1, 20, 8),
            initial="full",
            dstate="shared",
        )
        t.add(f"{prefix}state-shared", causal=causal, n=20, initial="shared", dstate="shared")
        t.add(
            f"{prefix}state-wide",
            causal=causal,
            q=(3, 20, 16),
            k=(1, 20, 16),
            v=(1, 20, 16),
            initial="wide",
            dstate="full",
        )
        t.add(f"{prefix}no-lead", causal=causal, lead=(), n=20, initial="full", dstate="full")
        t.add(f"{prefix}ones", causal=causal, lead=(1, 1, 1), n=1, d=1, data="positive")
        t.add(
            f"{prefix}one-head-many-ones",
            causal=causal,
            lead=(1, 1),
            n=19,
            d=1,
            e=5,
            data="positive",
        )

        for data in ("zero_rows", "zero_keys", "zeros"):
            for a in (1.0, 0.0):
                feature_map = "elu1" if data == "zero_rows" and a == 0 else "identity"
                t.add(
                    f"{prefix}{data}-a={a}",
                    causal=causal,
                    n=40,
                    a=a,
                    data=data,
                    feature_map=feature_map,
                    dstate="full",
                )
        for data in ("tiny", "huge", "mixed_sizes"):
            t.add(f"{prefix}{data}", causal=causal, n=40, data=data)
        t.add(f"{prefix}tiny-bfloat16", causal=causal, n=40, data="tiny", dtype="bfloat16")
        t.add(f"{prefix}huge-elu1", causal=causal, n=40, data="huge", feature_map="elu1")

        t.add(f"{prefix}qk-float32-v-bfloat16", causal=causal, v_dtype="bfloat16")
        t.add(f"{prefix}q-bfloat16-k-float16", causal=causal, dtype="bfloat16", k_dtype="float16")
        t.add(
            f"{prefix}q-float64-kv-float32",
            causal=causal,
            dtype="float64",
            k_dtype="float32",
            v_dtype="float32",
        )
        t.add(
            f"{prefix}bfloat16-dout-float32", causal=causal, dtype="bfloat16", dout_dtype="float32"
        )
        t.add(
            f"{prefix}state-float64",
            causal=causal,
            initial="full",
            initial_dtype="float64",
            dstate="full",
        )
        t.add(
            f"{prefix}state-bfloat16",
            causal=causal,
            dtype="bfloat16",
            initial="full",
            initial_dtype="bfloat16",
            dstate="full",
        )

        # entries that are exactly 0 as they reach the feature map: relu'(0) = 0
        for feature_map in ("relu", "elu1"):
            t.add(
                f"{prefix}zero_rows-{feature_map}-None",
                causal=causal,
                n=40,
                qk_norm=None,
                b=0.1,
                data="zero_rows",
                feature_map=feature_map,
            )

        for name, shape in (("B=0", (0, 2, 9)), ("H=0", (2, 0, 9)), ("N=0", (2, 2, 0))):
            lead, n = shape[:2], shape[2]
            t.add(f"{prefix}{name}", causal=causal, lead=lead, n=n, initial="full", dstate="full")
        t.add(f"{prefix}M=0", causal=causal, n=9, m=0)
        t.add(f"{prefix}M=0-state", causal=causal, n=9, m=0, initial="full", dstate="full")
        t.add(f"{prefix}N=0-M=9", causal=causal, n=0, m=9, initial="full", dstate="full")
        t.add(
            f"{prefix}no-queries",
            causal=causal,
            q=(0, 9, 16),
            k=(1, 9, 16),
            v=(9, 8),
            dstate="full",
        )

        for layout in LAYOUTS[1:]:
            for kind in ("float32", "bfloat16"):
                t.add(
                    f"{prefix}{layout}-{kind}",
                    causal=causal,
                    lead=(2, 2),
                    n=21,
                    d=16,
                    e=24,
                    initial="full",
                    dstate="full",
                    # one value everywhere leaves no gradient of q and k to compare but rounding
                    layout="contiguous" if layout == "scalar" else layout,
                    dout_layout=layout,
                    **_kind(kind),
                )

    # odd widths; at width 1 with norm, weights are 1 +- 1, so keys of one sign keep den off 0
    for width in (1, 3, 8, 20, 40, 72, 96, 192):
        for kind in ("float32", "bfloat16"):
            t.add(
                f"width-{width}-{kind}",
                causal=True,
                lead=(1,),
                n=41,
                d=width,
                data="positive" if width == 1 else "normal",
                **_kind(kind),
            )
    for d, e in ((16, 8), (8, 16), (256, 24), (24, 256), (1, 40), (40, 1)):
        for kind in ("float32", "bfloat16"):
            t.add(
                f"widths-{d}x{e}-{kind}",
                causal=True,
                lead=(1,),
                n=48,
                d=d,
                e=e,
                data="positive" if d == 1 else "normal",
                **_kind(kind),
            )
    for d in (32, 64, 128, 256):
        for e in (32, 64, 160, 256):
            kind = ("float32", "bfloat16", "float16", "tf32")[(d // 32 + e // 32) % 4]
            t.add(f"wide-{d}x{e}-{kind}", causal=True, lead=(1,), n=48, d=d, e=e, **_kind(kind))

    # every length near a tile edge, and large primes
    for n in (1, 2, 15, 16, 17, 31, 32, 63, 64, 65, 127, 128, 129, 193, 257, 521):
        t.add(f"length-{n}", causal=True, lead=(2,), n=n, d=16, initial="full", dstate="full")
        t.add(f"length-{n}-bfloat16", causal=n % 2 == 0, lead=(1,), n=n, d=16, dtype="bfloat16")
    t.add("length-1031", causal=True, lead=(1,), n=1031, d=24)
    t.add("length-1031-bfloat16", causal=True, lead=(1,), n=1031, d=24, dtype="bfloat16")
    t.add("ragged-both", causal=True, lead=(1,), n=300, m=450, d=20, initial="full", dstate="full")

    # a few positions behind a state, which have a kernel of their own
    step: dict[str, Any] = {"causal": True, "initial": "full", "dstate": "full"}
    for kind in kinds:
        t.add(f"step-{kind}", n=1, d=40, e=72, **step, **_kind(kind))
        t.add(
            f"step-3-{kind}", n=3, d=130, e=33, lead=(1,), layout="unaligned", **step, **_kind(kind)
        )
    for feature_map in ("elu1", "relu", "silu", "exp"):
        t.add(f"step-{feature_map}", n=2, d=20, feature_map=feature_map, **step)
    for name, n, m in (("16", 16, 16), ("N<M", 4, 16), ("N>M", 16, 5)):
        t.add(f"step-{name}", n=n, m=m, d=24, **step)
        t.add(f"step-{name}-not-causal", n=n, m=m, d=24, **step | {"causal": False})
    # heads that share a state, more of them than are treated at a time; and so many that they have blocks of their own
    for heads in (5, 30):
        q, kv = (2, heads, 3, 40), (2, 1, 3, 40)
        t.add(f"step-grouped-{heads}", q=q, k=kv, v=kv, dtype="bfloat16", **step)
    t.add("step-wide", q=(3, 2, 24), k=(1, 2, 24), v=(1, 2, 24), **step | {"initial": "wide"})
    for data in ("zeros", "tiny", "huge"):
        t.add(f"step-{data}", n=2, d=40, data=data, **step)
    t.add("step-plain", n=1, a=0.0, qk_norm=None, normalize=False, **step)
    t.add("step-256", n=1, d=256, e=200, lead=(1,), dtype="float64", **step)

    # signed sums near and at zero; sums beyond float16; large dout
    for data in ("small_product", "tiny_product"):
        t.add(data, lead=(2,), n=1, d=1, a=0.0, qk_norm=None, data=data)
    t.add(
        "eights-causal",
        causal=True,
        lead=(1,),
        n=50,
        d=16,
        a=0.0,
        qk_norm=None,
        data="eights",
        dtype="float16",
    )
    t.add("large-dout", causal=True, n=50, dtype="float16", dout_scale=1e3)
    t.add("offset", causal=True, lead=(1,), n=50, data="offset")

    # v far from zero: its spread is what dq and dk depend on. Gradients of few rows are judged by the size of v, so that it
    # takes 1000 rows to see an error of the size of the spread.
    for data in ("offset", "mean16"):
        for kind in ("float32", "bfloat16"):
            for prefix, causal in both:
                far: dict[str, Any] = {"causal": causal, "data": data, **_kind(kind)}
                name = f"{prefix}{data}-{kind}"
                t.add(f"{name}-state", n=40, d=24, e=40, initial="full", dstate="full", **far)
                t.add(
                    f"{name}-unnormalised",
                    n=40,
                    normalize=False,
                    initial="full",
                    dstate="full",
                    **far,
                )
                t.add(f"{name}-1031", q=(3, 1031, 16), k=(1, 1031, 16), v=(1, 1031, 24), **far)
                t.add(
                    f"{name}-1031-initial",
                    q=(2, 2, 1031, 16),
                    k=(2, 1, 1031, 16),
                    v=(1, 2, 1031, 8),
                    initial="full",
                    **far,
                )

    # biased data over long sequences
    for kind in ("float32", "bfloat16"):
        for causal in (False, True):
            prefix = "causal-" if causal else ""
            t.add(
                f"{prefix}biased-{kind}",
                causal=causal,
                lead=(1,),
                n=2048,
                d=32,
                data="biased",
                **_kind(kind),
            )
    return t.cases


def _kind(kind: str) -> dict[str, Any]:
    if kind == "tf32":
        return {"dtype": "float32", "precision": "tf32"}
    return {"dtype": kind}


def _long() -> list[Case]:
    """Where sums drift and large terms cancel; for references that are O(N): see piecewise.py."""
    t = _Table()
    for kind in ("float32", "bfloat16"):
        for prefix, causal in (("", False), ("causal-", True)):
            for data in ("biased", "offset", "mean16"):
                t.add(
                    f"long-{prefix}{data}-{kind}",
                    causal=causal,
                    n=16384,
                    d=64,
                    data=data,
                    lead=(2,),
                    **_kind(kind),
                )
        for norm in ("l2", None):
            t.add(
                f"long-elu1-{norm}-{kind}",
                causal=True,
                lead=(1,),
                n=131072,
                d=32,
                feature_map="elu1",
                qk_norm=norm,
                **_kind(kind),
            )
    # sums beyond the largest float16
    for prefix, causal in (("", False), ("causal-", True)):
        t.add(
            f"long-{prefix}eights",
            causal=causal,
            n=4096,
            lead=(1,),
            a=0.0,
            qk_norm=None,
            data="eights",
            dout_scale=1e3,
            dtype="float16",
        )
    return t.cases


CASES = _table()
LONG = _long()
SMALL = [case for case in CASES if case.small]
BY_NAME = {case.name: case for case in CASES + LONG}
assert len(BY_NAME) == len(CASES) + len(LONG), "two cases have one name"
