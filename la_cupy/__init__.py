"""Exact linear attention, forward and backward, for NumPy and CuPy arrays.

>>> import numpy as np
>>> import la_cupy as la
>>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 100, 16), dtype=np.float32)
>>> out, den = la.linear_attention(q, k, v, causal=True, return_normalizer=True)
>>> grads = la.linear_attention_vjp(np.ones_like(out), q, k, v, normalizer=den, causal=True)
>>> out.shape, grads.k.shape
((2, 100, 16), (2, 100, 16))

Importing this needs neither a GPU nor CuPy, JAX or PyTorch; each is imported when its arrays
arrive. Arrays of other libraries: `la_cupy.interop`.
"""

from .api import explain, linear_attention, linear_attention_vjp
from .results import Gradients, State

__version__ = "0.1.0"

__all__ = [
    "Gradients",
    "State",
    "__version__",
    "explain",
    "linear_attention",
    "linear_attention_vjp",
]
