"""Every key of averaging and of compressed gradients reaches what it is for."""

from typing import Any

import pytest
import torch

import train
from powergossip.network import Processes
from powergossip.training.settings import checked, method_options
from tests.test_centralized import configured, trained

# What a key's effect is seen with, besides another value for it than its default.
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "optimizer_diffusion_rate": (0.5, {"optimizer": "dpsgd"}),
    "optimizer_rank": (2, {}),
    "optimizer_num_iterations": (1, {}),
    "optimizer_warm_start": (False, {}),
    "optimizer_round_weights": (True, {}),
    "optimizer_compressor": ("top-k", {"optimizer": "choco"}),
    "optimizer_keep_ratio": (0.5, {"optimizer": "choco", "optimizer_compressor": "top-k"}),
    "optimizer_levels": (7, {"optimizer": "choco", "optimizer_compressor": "qsgd"}),
    "optimizer_unbiased": (True, {"optimizer": "choco", "optimizer_compressor": "qsgd"}),
    "optimizer_theta": (1.0, {"optimizer": "moniqua"}),
    "optimizer_min_compression_rate": (50.0, {"optimizer": "powersgd"}),
    "optimizer_start_compressing_after": (2, {"optimizer": "powersgd"}),
    "optimizer_num_batches_per_step": (2, {"optimizer": "powersgd"}),
    "optimizer_sample_ratio": (1.0, {"optimizer": "dgc"}),
    "optimizer_momentum_masking": (False, {"optimizer": "dgc"}),
    "optimizer_warmup_epochs": (1, {"optimizer": "dgc"}),
    "optimizer_warmup_ratios": ([0.5], {"optimizer": "dgc", "optimizer_warmup_epochs": 1}),
    "optimizer_fp16_values": (True, {"optimizer": "dgc"}),
    "optimizer_int32_indices": (False, {"optimizer": "dgc"}),
    "optimizer_start_iteration": (5, {"optimizer": "ddp-powersgd", "n_workers": 1}),
    "optimizer_error_feedback": (False, {"optimizer": "ddp-powersgd", "n_workers": 1}),
}
TIME_ONLY = "optimizer_max_adaptation_iterations"  # beyond them, all numbers are sorted


def test_every_key_has_its_case() -> None:
    keys = {key for key in train.Config.__dataclass_fields__ if key.startswith("optimizer_")}
    assert keys == {*CASES, TIME_ONLY}


@pytest.mark.parametrize("key", CASES)
def test_a_key_changes_what_is_computed_or_sent(key: str) -> None:
    value, common = CASES[key]
    first, second = trained(8, **common), trained(8, **common, **{key: value})
    same = torch.equal(first.parameters.x, second.parameters.x)
    assert not same or (first.network.bits != second.network.bits).any()


def test_a_key_that_changes_time_only_arrives() -> None:
    c = checked(configured(optimizer="dgc", **{TIME_ONLY: 3}), Processes())
    assert method_options(c)["max_adaptation_iterations"] == 3
