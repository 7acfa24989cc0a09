"""Calls with CUDA tensors: smddp beside torch's NCCL, to which it hands them on."""
