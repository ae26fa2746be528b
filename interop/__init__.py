"""Arrays of other libraries: adapters for JAX and PyTorch, and `from_dlpack` for all others.

Nothing here computes; arrays, streams and workspaces are passed on. `la_cupy.interop.jax` and
`la_cupy.interop.torch` import JAX and PyTorch; this module imports neither, and no CuPy.
"""

from .dlpack import from_dlpack

__all__ = ["from_dlpack"]
