"""The kernels' run-time parameters: the same structures as kernels_cu/chunk/params.cuh.

NumPy's aligned structured types follow the C layout rules, so a record's bytes are the
structure that a launch passes by value.
"""

from functools import cache

import numpy as np

MAX_RANK = 6
"""Leading axes that the kernels take after merging; kMaxRank in params.cuh."""

DOTS = 5
"""Sums over a row that the gradients of q and k need; kRowSums in params.cuh."""

DTYPE_CODES = {"bfloat16": 0, "float16": 1, "float32": 2, "float64": 3}

_LEAD = ("lead", np.int64, (MAX_RANK,))

TENSOR = np.dtype(
    [
        ("data", np.uint64),
        _LEAD,
        ("row", np.int64),
        ("dtype", np.int32),
        ("aligned", np.int32),
    ],
    align=True,
)
ROW_VECTOR = np.dtype([("data", np.uint64), _LEAD], align=True)
STATE_FIELDS = ("kv", "k_sum", "v_sum", "count")


@cache
def state_names(name: str) -> tuple[str, ...]:
    """Under which plans know the parts of a state."""
    return tuple(f"{name}.{field}" for field in STATE_FIELDS)


STATE_PARTS = np.dtype(
    [(field, np.uint64) for field in STATE_FIELDS]
    + [(f"{field}_lead", np.int64, (MAX_RANK,)) for field in STATE_FIELDS],
    align=True,
)
PARAMS = np.dtype(
    [(name, TENSOR) for name in ("q", "k", "v", "dout", "dst")]
    + [(name, ROW_VECTOR) for name in ("den", "delta", "dots")]
    + [(name, STATE_PARTS) for name in ("start", "final")]
    + [
        ("size", np.int32, (MAX_RANK,)),
        ("outer", np.int32),
        ("rank", np.int32),
        ("n", np.int64),
        ("m", np.int64),
        ("d", np.int32),
        ("e", np.int32),
        ("query_shift", np.int64),
        ("origin", np.int64),
        ("chunks", np.int64),
        ("chunks_per_segment", np.int64),
        ("segments", np.int32),
        ("splits", np.int32),
        ("pieces", np.int32),
        ("unit_norm", np.int32),
        ("normalize", np.int32),
        ("levelled", np.int32),
        ("phase", np.int32),
        ("a", np.float64),
        ("b", np.float64),
        ("a_float", np.float32),
        ("b_float", np.float32),
        ("adds", np.int32),
    ],
    align=True,
)
MAP_BYTES = 128
"""A tensor map of the driver; TensorMap in kernels_cu/ptx/tma.cuh."""
MAPS = ("q", "k", "v", "dout", "dst", "second")
"""The arrays of `stream` that have maps, in the order of StreamParams in params.cuh."""
_STREAM_FIELDS = [
    ("maps", np.dtype((np.void, MAP_BYTES)), (len(MAPS),)),
    ("axes", np.int32, (len(MAPS), 4)),
    ("second", TENSOR),
    ("p", PARAMS),
]
STREAM_PARAMS = np.dtype(  # maps are aligned to 64 bytes
    [*_STREAM_FIELDS, ("unused", np.dtype((np.void, -np.dtype(_STREAM_FIELDS).itemsize % 64)))]
)
STEP_PARAMS = np.dtype([("p", PARAMS), ("feature", np.int32)], align=True)
STEP_WIDTH = 256
"""The widest rows of q and k that `step` takes; kStepWidth in step.cu."""
STEP_KEYS = 16
"""Keys that `step` takes at most; kStepKeys in step.cu."""
STEP_QUERIES = 8
"""Queries that it works on at a time; kStepQueries in step.cu."""

SCAN_PARAMS = np.dtype(
    [(name, STATE_PARTS) for name in ("slots", "start", "total")]
    + [
        ("v", TENSOR),
        ("m", np.int64),
        ("size", np.int32, (MAX_RANK,)),
        ("rank", np.int32),
        ("pieces", np.int32),
        ("summed", np.int32),
        ("reversed", np.int32),
        ("d", np.int32),
        ("e", np.int32),
    ],
    align=True,
)
SCAN_WIDTH = 256
"""Threads of a block of `scan`; kScanWidth in scan.cu."""
SCAN_NUMBERS = 4
"""Numbers of kv that each of them has; kScanNumbers in scan.cu."""

RELEVEL_PARAMS = np.dtype(
    [(name, STATE_PARTS) for name in ("from", "to")]
    + [
        ("v", TENSOR),
        ("m", np.int64),
        ("size", np.int32, (MAX_RANK,)),
        ("rank", np.int32),
        ("sign", np.int32),
        ("d", np.int32),
        ("e", np.int32),
    ],
    align=True,
)
RELEVEL_ROWS = 8
"""Rows that one block of `relevel` treats; kRelevelRows in relevel.cu."""

PHASES = {"whole": 0, "dots": 1, "apply": 2}
