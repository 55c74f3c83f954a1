"""Processes and messages of torch.distributed."""
