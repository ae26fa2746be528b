"""A kernel without a race in which racecheck reports one: why `pytest --racecheck` has barriers twice.

    compute-sanitizer --tool racecheck python tests/racecheck_reports.py [twice]

Four warps write shared memory, all eight meet, the other four read it, and all meet again. What
makes the difference is a barrier that the writers have to themselves behind the first meeting: with
it racecheck of CUDA 13.0 reports hazards between the write and the read (80 lines of them on an H200),
even where the meeting is __syncthreads(), and none without. With `twice` there are none either: then
all warps meet once more before the writers go on.
"""

import sys

import cupy

SOURCE = r"""
extern "C" __global__ void exchange(const float* in, float* out, int turns, bool twice) {
  __shared__ float shared[128];
  const int i = threadIdx.x % 128;
  const bool writer = threadIdx.x >= 128;
  float sum = 0;
  for (int turn = 0; turn < turns; ++turn) {
    if (writer) {
      shared[i] = in[(blockIdx.x * turns + turn) * 128 + i];
      asm volatile("bar.sync 1, 256;" ::: "memory");
      if (twice) asm volatile("bar.sync 9, 256;" ::: "memory");
      asm volatile("bar.sync 3, 128;" ::: "memory");
      asm volatile("bar.sync 4, 256;" ::: "memory");
    } else {
      asm volatile("bar.sync 1, 256;" ::: "memory");
      if (twice) asm volatile("bar.sync 9, 256;" ::: "memory");
      sum += shared[127 - i];
      asm volatile("bar.sync 4, 256;" ::: "memory");
    }
  }
  if (!writer) out[blockIdx.x * 128 + i] = sum;
}
"""


def main(twice: bool) -> None:
    """Run the kernel, and check what it adds up."""
    blocks, turns = 264, 8
    x = cupy.random.rand(blocks, turns, 128, dtype=cupy.float32)
    out = cupy.empty((blocks, 128), cupy.float32)
    kernel = cupy.RawKernel(SOURCE, "exchange", options=("-lineinfo",))
    for _ in range(20):
        kernel((blocks,), (256,), (x, out, turns, twice))
    cupy.testing.assert_allclose(out, x.sum(axis=1)[:, ::-1], rtol=1e-5)
    print("the sums are right")


if __name__ == "__main__":
    main(twice="twice" in sys.argv[1:])
