"""The CUDA C++ sources, compiled on first use; there is no Python code here.

Four layers, each including only those to its left::

    ptx/ (one instruction a wrapper)  ->  tile/ (tiles, copies, products)  ->  chunk/ (the maths)  ->  *.cu (entry points)

`la_cupy.compile` reads the files with ``importlib.resources.files("la_cupy.kernels_cu")``.
"""
