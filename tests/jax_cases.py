"""One call of everything through the JAX adapter, by the names of measures.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cases import Case, Inputs, name_results

from la_cupy.results import Gradients, State


def needs_x64(inputs: Inputs) -> bool:
    return any(x.dtype == np.float64 for x in inputs.arrays())


@contextmanager
def precision_of(inputs: Inputs) -> Iterator[None]:
    """JAX with float64 if there is any, and otherwise as it comes, without."""
    with jax.enable_x64(needs_x64(inputs)):
        yield


QUICK = {"xla_backend_optimization_level": "0"}
"""Compiler options that halve the time a small program takes to compile."""


def call(
    case: Case, x: Inputs, attention: Callable[..., Any], options: dict[str, str] | None = None
) -> dict[str, Any]:
    """Every result of a case, in one compiled program, as NumPy arrays."""
    with precision_of(x):
        arrays = x.map(jnp.asarray)
        program = jax.jit(lambda inputs: results_of(case, inputs, attention))
        results = program.lower(arrays).compile(options)(arrays)
        return {name: np.asarray(value) for name, value in results.items()}


def results_of(case: Case, x: Inputs, attention: Callable[..., Any]) -> dict[str, Any]:
    """The same for JAX arrays, inside a program."""

    def function(q: Any, k: Any, v: Any, initial: Any) -> Any:
        out, state, den = attention(
            q,
            k,
            v,
            **case.options,
            initial_state=initial,
            return_state=True,
            return_normalizer=True,
        )
        return (out, state), den

    (out, state), pull, den = jax.vjp(function, x.q, x.k, x.v, x.initial_state, has_aux=True)
    dstate = State(*map(jnp.zeros_like, state))
    if x.dstate is not None:  # JAX's cotangents have the shape of what they belong to
        pairs = zip(x.dstate, state, strict=True)
        dstate = State(*(jnp.broadcast_to(d.astype(s.dtype), s.shape) for d, s in pairs))
    dq, dk, dv, dinitial = pull((x.dout.astype(out.dtype), dstate))
    return name_results(out=out, state=state, den=den, grads=Gradients(dq, dk, dv, dinitial))
