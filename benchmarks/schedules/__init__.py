"""The pipeline's schedules over stages that sleep, against those of torch.distributed.pipelining."""
