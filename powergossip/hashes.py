"""Hashes of the contents of tensors."""

import hashlib

import torch
from torch import Tensor


def sha256(*tensors: Tensor) -> str:
    """A hash of the elements of tensors on any device, in hexadecimal digits."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
