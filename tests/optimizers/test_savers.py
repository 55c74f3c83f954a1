"""A model between two steps is a model for all programs that save, load or copy one."""

import copy
import functools
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from powergossip.network import processes
from powergossip.optimizers import (
    DGC,
    DGCSGD,
    Config,
    DGCConfig,
    GossipOptimizer,
    PowerSGD,
    dgc,
    optimizer_step,
)
from tests.harness.helpers import files_below
from tests.harness.user_loop import OPTIMIZERS, hooked, loss, mlp, numbers

State = dict[str, Tensor]
Method = Callable[[Any], Callable[[], None]]


# --- Methods: a step of a model, with a batch of this process ------------------------------------


def gossip_optimizer(model: nn.Module) -> Callable[[], None]:
    return GossipOptimizer(OPTIMIZERS["momentum"](model), "dpsgd").step


def hook(model: nn.Module) -> Callable[[], None]:
    ddp, local, _ = hooked(model=model)

    def step() -> None:
        model.zero_grad()
        loss(ddp, processes().rank, 0).backward()
        local.step()

    return step


def power_sgd(model: nn.Module) -> Callable[[], None]:
    made = PowerSGD(model.parameters(), Config(rank=1, start_compressing_after_num_steps=0))
    local = OPTIMIZERS["momentum"](model)
    return lambda: optimizer_step(local, made)


def deep_gradient_compression(model: nn.Module) -> Callable[[], None]:
    made = DGC(model.parameters(), DGCConfig(compress_ratio=0.1))
    local = DGCSGD(model.parameters(), lr=0.1, momentum=0.9)
    return lambda: dgc.optimizer_step(local, made)


METHODS: list[Method] = [gossip_optimizer, hook, power_sgd, deep_gradient_compression]


# --- Programs: they save a model in a folder, and return the tensors saved ------------------------


def torch_save(model: nn.Module, folder: Path) -> State:
    torch.save(model.state_dict(), folder / "model.pt")
    return torch.load(folder / "model.pt")


def pickled(model: nn.Module, folder: Path) -> State:
    (folder / "model.pkl").write_bytes(pickle.dumps(model))
    found: nn.Module = pickle.loads((folder / "model.pkl").read_bytes())
    return found.state_dict()


def deep_copy(model: nn.Module, folder: Path) -> State:
    return torch_save(copy.deepcopy(model), folder)


def moving_average(model: nn.Module, folder: Path) -> State:
    average = AveragedModel(model)
    average.update_parameters(model)
    return torch_save(average.module, folder)


def distributed_checkpoint(model: nn.Module, folder: Path) -> State:
    found = {name: torch.full_like(value, torch.nan) for name, value in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one process
        dcp.save(model.state_dict(), checkpoint_id=folder, no_dist=True)
        dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found


def safetensors_model(model: nn.Module, folder: Path) -> State:
    files = pytest.importorskip("safetensors.torch")
    files.save_model(model, folder / "model.safetensors")
    found = copy.deepcopy(model)
    files.load_model(found, folder / "model.safetensors")
    return found.state_dict()


def safetensors_file(model: nn.Module, folder: Path) -> State:
    files = pytest.importorskip("safetensors.torch")
    files.save_file(model.state_dict(), folder / "model.safetensors")
    found: State = files.load_file(folder / "model.safetensors")
    return found


def accelerate_model(model: nn.Module, folder: Path) -> State:
    utils = pytest.importorskip("accelerate.utils.other")
    torch.save(utils.clean_state_dict_for_safetensors(model.state_dict()), folder / "model.pt")
    return torch.load(folder / "model.pt")


def hub_model(model: nn.Module, folder: Path) -> State:
    hub = pytest.importorskip("huggingface_hub")
    pytest.importorskip("safetensors")
    hub.save_torch_model(model, folder)
    found = copy.deepcopy(model)
    hub.load_torch_model(found, folder)
    return found.state_dict()


PROGRAMS = [
    *(torch_save, pickled, deep_copy, moving_average, distributed_checkpoint),
    *(safetensors_model, safetensors_file, accelerate_model, hub_model),
]


def steps(model: nn.Module, step: Callable[[], None]) -> None:
    for t in range(2):
        model.zero_grad()
        loss(model, processes().rank, t).backward()
        step()


@functools.cache
def without_saving(method: Method) -> Tensor:
    model = mlp()
    step = method(model)
    for _ in range(2):
        steps(model, step)
    return numbers(model)


def size(folder: Path) -> int:
    return sum(len(content or b"") for content in files_below(folder).values())


@pytest.mark.parallel([2])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_saves_the_model_and_its_parts(
    program: Callable[[Any, Path], State], tmp_path: Path
) -> None:
    """All parameters, in a file of the usual size. Training goes on from values that are loaded."""
    for method in METHODS if program is torch_save else (gossip_optimizer, hook):
        model = mlp()
        step = method(model)
        steps(model, step)
        for index, part in enumerate((model, model[2])):
            plain = copy.deepcopy(part)
            for parameter in plain.parameters():
                parameter.data = parameter.data.clone()
            saved: list[State] = []
            sizes: list[int] = []
            for kind, saving in (("plain", plain), ("other", part)):
                folder = tmp_path / f"{method.__name__}-{index}-{kind}-{processes().rank}"
                folder.mkdir()
                saved.append(program(saving, folder))
                sizes.append(size(folder))
            expected, found = saved
            assert found.keys() == part.state_dict().keys()
            assert all(torch.equal(found[name], value) for name, value in expected.items())
            assert sizes[0] == sizes[1]
            with torch.no_grad():
                for parameter in part.parameters():
                    parameter.fill_(9)
            part.load_state_dict(found)
        steps(model, step)
        assert torch.equal(numbers(model), without_saving(method))
