"""The layout of parameters: every element has one index, and views are views."""

from copy import deepcopy
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from powergossip import parameters
from powergossip.parameters import (
    Layout,
    Parameters,
    batches,
    is_misaligned,
    matrix_shape,
    put_in,
    take_out,
)
from tests.harness.fake_device import CUDA, fake_device

shapes_of_tensors = st.lists(
    st.lists(st.integers(1, 5), max_size=4).map(tuple), min_size=1, max_size=8
)


@given(shapes_of_tensors)
def test_tensors_tile_the_buffer(shapes: list[tuple[int, ...]]) -> None:
    layout = Layout(shapes)
    flat = torch.arange(layout.size)
    tensors = layout.tensors(flat)
    assert [tuple(t.shape) for t in tensors] == shapes
    assert torch.equal(torch.cat([t.flatten() for t in tensors]).sort().values, flat)


@given(shapes_of_tensors, st.integers(1, 4), st.integers(1, 3))
def test_stacks_hold_the_matrices_and_ranks_cut_prefixes(
    shapes: list[tuple[int, ...]], rank: int, workers: int
) -> None:
    layout = Layout(shapes)
    x = torch.arange(workers * layout.size).view(workers, layout.size)
    stacked = [
        matrix.flatten().tolist()
        for stack in layout.stacks
        for batch in batches(x, stack)
        for matrix in batch
    ]
    expected = [
        tensor.flatten().tolist()
        for worker in x
        for tensor in layout.tensors(worker)
        if tensor.dim() >= 2
    ]
    assert sorted(stacked) == sorted(expected)

    low_rank = layout.compressible(rank)
    assert low_rank == layout.stacks[: len(low_rank)]
    numbers = sum(prod(s) for s in shapes if len(s) >= 2 and min(matrix_shape(s)) > rank)
    assert numbers == (low_rank[-1].stop if low_rank else 0)


def test_matrices_of_a_shape_are_one_batch_for_one_worker() -> None:
    layout = Layout([(4, 3), (5,), (2, 2), (4, 3, 1), (4, 3)])
    (batch,) = batches(torch.zeros(1, layout.size), layout.stacks[0])
    assert batch.shape == (3, 4, 3)


def test_a_negative_size_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"shape=\(3, -1\): use sizes of 0 or more"):
        Layout([(2, 2), (3, -1)])


def test_vectors_follow_and_what_is_not_decayed_comes_last() -> None:
    layout = Layout([(3,), (2, 2), (4,), (5,)], decayed=[False, True, True, True])
    assert layout.starts == [4 + 9, 0, 4, 8]
    assert layout.matrices_size == 4
    assert layout.spans([1, 2, 3]) == [slice(0, 13)]


def test_spans_are_moved_out_and_written_back() -> None:
    """take_out leaves zeros in the spans alone, and put_in restores x."""
    x = torch.arange(1.0, 21).view(2, 10)
    before, spans = x.clone(), [slice(1, 3), slice(6, 9)]
    packed = torch.full((2, 7), -1.0)
    take_out(x, spans, packed)
    assert packed.tolist() == [[2, 3, 7, 8, 9, -1, -1], [12, 13, 17, 18, 19, -1, -1]]
    assert x.tolist() == [
        [1, 0, 0, 4, 5, 6, 0, 0, 0, 10],
        [11, 0, 0, 14, 15, 16, 0, 0, 0, 20],
    ]
    put_in(packed, spans, x)
    assert torch.equal(x, before)


def small_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(3, 2)
    )


def test_models_compute_with_the_flat_memory() -> None:
    models = [small_model(), small_model()]
    expected = [[p.detach().clone() for p in model.parameters()] for model in models]
    images = torch.randn(4, 1, 3, 3)
    before = [model.eval()(images) for model in models]

    parameters = Parameters(models)
    assert parameters.x.shape == (2, 3 * 9 + 3 + 6 + 6 + 2)
    for model, old, output in zip(models, expected, before, strict=True):
        for new_value, old_value in zip(model.parameters(), old, strict=True):
            assert torch.equal(new_value, old_value)
        assert torch.equal(model(images), output)

    parameters.x[0].zero_()
    assert all(p.abs().sum() == 0 for p in models[0].parameters())
    assert models[0](images).abs().sum() == 0


@pytest.mark.parametrize("outputs", [1, 5, 10])
def test_equal_models_have_the_same_bits_in_every_row(outputs: int) -> None:
    """The bits of a matrix product may depend on the alignment of its operands."""
    models = [nn.Linear(128, outputs) for _ in range(4)]
    parameters, batch = Parameters(models), torch.randn(64, 128)
    parameters.x[:] = parameters.x[0]
    found = [model(batch) for model in models]
    for output in found:
        output.square().sum().backward()
    assert all(torch.equal(output, found[0]) for output in found)
    assert all(torch.equal(row, parameters.grad[0]) for row in parameters.grad)
    for row in (*parameters.x, *parameters.grad):
        assert row.data_ptr() % 64 == 0


def test_gradients_arrive_in_the_flat_memory_and_add_up() -> None:
    model = small_model()
    parameters = Parameters([model])
    images = torch.randn(4, 1, 3, 3)
    for times in (1, 2):
        model.eval()(images).square().sum().backward()
        flat = parameters.layout.tensors(parameters.grad[0])
        alone = small_model()
        alone.load_state_dict(model.state_dict())
        alone.eval()(images).square().sum().backward()
        for ours, theirs in zip(flat, alone.parameters(), strict=True):
            assert theirs.grad is not None
            torch.testing.assert_close(ours, times * theirs.grad)


def test_a_parameter_without_elements_stays_as_it_is() -> None:
    """As a frozen one: no method has to compress it."""
    model = nn.Linear(2, 2)
    empty = model.empty = nn.Parameter(torch.zeros(0, 3))
    parameters = Parameters([model])
    assert parameters.names == ["weight", "bias"]
    assert model.empty is empty
    with pytest.raises(ValueError, match="has elements and requires_grad"):
        Parameters([nn.ParameterList([empty])])


def test_running_statistics_lie_in_the_buffers() -> None:
    model = small_model()
    parameters = Parameters([model])
    assert parameters.buffers.shape == (1, 6)
    model.train()(torch.randn(8, 1, 3, 3) + 5)
    mean, variance = model.get_buffer("1.running_mean"), model.get_buffer("1.running_var")
    assert torch.equal(parameters.buffers[0], torch.cat([mean, variance]))
    assert mean.abs().min() > 0


def test_weight_decay_spares_normalization_layers() -> None:
    parameters = Parameters([small_model()])
    touched = torch.zeros(parameters.layout.size)
    for span in parameters.decay_spans():
        touched[span] = 1
    by_name = dict(zip(parameters.names, parameters.layout.tensors(touched), strict=True))
    assert {name: bool(t.all()) for name, t in by_name.items()} == {
        "0.weight": True,
        "0.bias": True,
        "1.weight": False,
        "1.bias": False,
        "4.weight": True,
        "4.bias": True,
    }


def test_shapes_and_marks_must_match() -> None:
    with pytest.raises(ValueError, match=r"decayed.* 1 .*: use 2"):
        Layout([(1,), (2,)], decayed=[True])


class Net(nn.Module):
    def __init__(self, norm: nn.Module, labels: int):
        super().__init__()
        self.norm, self.output = norm, nn.Linear(8, labels)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(
    ("norm", "labels", "misaligned"),
    [
        (nn.BatchNorm2d(8), 8, False),
        (nn.BatchNorm2d(8), 10, True),
        (nn.BatchNorm2d(6), 8, True),  # its bias
        (nn.BatchNorm2d(6, affine=False), 8, True),  # its running variance
        (nn.GroupNorm(2, 8), 10, False),  # PyTorch's own kernels
    ],
)
def test_batch_norm_of_misaligned_tensors_is_without_cudnn(
    norm: nn.Module, labels: int, misaligned: bool, enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU. Also if the layer raises. Afterwards cuDNN is enabled if it was before."""
    norm = deepcopy(norm)
    monkeypatch.setattr(parameters, "check_parameters", lambda *_, **__: None)
    monkeypatch.setattr(torch.backends.cudnn, "enabled", enabled)
    with fake_device():
        Parameters([Net(norm, labels)], CUDA)
    seen = []

    def forward(fails: bool) -> None:
        seen.append(torch.backends.cudnn.enabled)
        if fails:
            raise ZeroDivisionError

    monkeypatch.setattr(norm, "forward", forward)
    norm(False)
    assert torch.backends.cudnn.enabled == enabled
    with pytest.raises(ZeroDivisionError):
        norm(True)
    assert torch.backends.cudnn.enabled == enabled
    assert seen == [enabled and not misaligned] * 2


def test_no_memory_of_a_cpu_is_misaligned() -> None:
    assert not is_misaligned(torch.zeros(3)[1:])


def test_rows_of_buffers_begin_at_a_multiple_of_64_bytes() -> None:
    found = Parameters([nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(3)])
    for memory in (found.x, found.grad, found.buffers):
        assert {row.storage_offset() * row.itemsize % 64 for row in memory} == {0}
