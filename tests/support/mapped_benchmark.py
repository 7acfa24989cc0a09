"""The benchmark of CUDA tensors where there is no GPU: its ranks run on the CPU, both groups over smddp."""

from __future__ import annotations

from benchmarks.cuda import rank

from opensmd.launch.mapped_cuda import cuda_on_cpu

if __name__ == "__main__":
    cuda_on_cpu.install()
    rank.main()
