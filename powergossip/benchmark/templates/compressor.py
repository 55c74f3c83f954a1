"""A compressor for the benchmark, in CHOCO-SGD. Change the class and the settings, then run

powergossip-benchmark run my_method.py
powergossip-benchmark show my_method
"""

from dataclasses import dataclass

import torch

from powergossip import compressors


@dataclass
class LargestInHalf:
    """C(v) = the largest entries of a matrix with 16 bits each, 0 elsewhere."""

    keep: float = 0.05  # fraction of the entries, an option

    def kept(self, rows, columns):
        return max(1, int(self.keep * rows * columns))

    def stable_rate(self, rows, columns):  # of γ: the less is kept, the smaller
        return self.kept(rows, columns) / (rows * columns)

    def fields(self, rows, columns):  # of a message, whose bits follow from them
        kept = self.kept(rows, columns)
        return compressors.Field(torch.float16, kept), compressors.Field(torch.int32, kept)

    def compress(self, v, stream):  # [*, row, column]
        kept, v = self.kept(*v.shape[-2:]), v.flatten(-2)
        positions = v.abs().topk(kept, sorted=False).indices
        return v.gather(-1, positions), positions

    def decompress(self, fields, out, stream):  # adds C(v), from the fields only
        values, positions = fields
        out.flatten(-2).scatter_add_(-1, positions.long(), values.to(out.dtype))


compressors.COMPRESSORS["largest-in-half"] = LargestInHalf


def settings(rates):  # to try; options of the compressor begin with optimizer_
    method = {"optimizer": "choco", "optimizer_compressor": "largest-in-half"}
    return [
        {**method, "optimizer_keep": keep, "learning_rate": rate}
        for keep in (0.05, 0.1)
        for rate in rates
    ]


# The quick tier tries the first 4 settings. Images train with SGD, text with AdamW.
SETTINGS = {"all": settings((0.05, 0.02)), "text": settings((0.01, 0.003))}
