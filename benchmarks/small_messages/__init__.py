"""Direct calls beside DeepSpeed's shared-memory operator and torch.distributed."""
