"""Laws of the models: shapes, published numbers of parameters, normalization, causality."""

from typing import Any

import pytest
import torch
from torch import nn

from powergossip.parameters import Parameters
from powergossip.tasks import language_models, models


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# Images.


@pytest.mark.parametrize("name", models.ARCHITECTURES)
@pytest.mark.parametrize("shape", [(1, 8, 8), (2, 40, 33)])
def test_models_take_images_of_any_task(name: str, shape: tuple[int, ...]) -> None:
    if name == "VGG11" and min(shape[1:]) < 32:
        with pytest.raises(
            ValueError, match=f"^task_architecture={name}: use .* {shape[1]} × {shape[2]}$"
        ):
            models.ARCHITECTURES[name](shape, 7)
        return
    model = models.ARCHITECTURES[name](shape, 7)
    assert model(torch.zeros(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize(
    ("models_of", "name", "options", "count"),
    [
        (models.ARCHITECTURES, "ResNet20", {"normalization": "group"}, 272_474),
        (models.ARCHITECTURES, "ResNet110", {"normalization": "batch"}, 1_730_714),
        (models.ARCHITECTURES, "ResNet18", {"normalization": "batch"}, 11_173_962),
        (models.ARCHITECTURES, "VGG11", {"normalization": "group"}, 9_228_362),
        # zeros for new channels have no parameters
        (models.ARCHITECTURES, "ResNet20", {"shortcut": "zeros"}, 269_722),
        (models.ARCHITECTURES, "ResNet110", {"shortcut": "zeros"}, 1_727_962),
        (models.ARCHITECTURES, "VGG11", {"plain": True}, 9_750_922),
        # as those of torchvision
        (models.IMAGENET, "ResNet18", {}, 11_689_512),
        (models.IMAGENET, "ResNet50", {}, 25_557_032),
        (models.IMAGENET, "VGG16BN", {}, 138_365_992),
    ],
)
def test_models_have_the_published_number_of_parameters(
    models_of: dict[str, Any], name: str, options: dict[str, Any], count: int
) -> None:
    of_cifar = models_of is models.ARCHITECTURES
    side, n_labels = (32, 10) if of_cifar else (224, 1000)
    with torch.device("meta"):  # without memory
        model = models_of[name]((3, side, side), n_labels, initialization="torch", **options)
        assert size(model) == count
        if not of_cifar:
            assert model(torch.zeros(2, 3, side, side)).shape == (2, n_labels)


def test_models_of_language_have_the_parameters_of_their_formulas() -> None:
    """V embeddings of size d. A block has 12 d² weights and 2 d of its norms."""
    n_words, d, layers = 1000, 128, 2
    with torch.device("meta"):
        lstm = language_models.LSTM((28_869, 30))
        gpt = language_models.GPT((n_words, 30), hidden_size=d, num_layers=layers)
    assert size(lstm) == 28_949_319  # published
    assert {"encoder.weight", "rnn.weight_ih_l1"} <= {name for name, _ in lstm.named_parameters()}
    assert size(gpt) == n_words * d + 12 * layers * d**2 + (2 * layers + 1) * d


# As those of torchvision.
@pytest.mark.parametrize("name", ["ResNet20", "VGG11"])
def test_initial_weights_as_published_are_normal_by_the_fan_out(name: str) -> None:
    model = models.ARCHITECTURES[name]((3, 32, 32), 10, initialization="fan-out")
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            wanted = (2 / (layer.kernel_size[0] ** 2 * layer.out_channels)) ** 0.5
            tolerance = 5 / (2 * layer.weight.numel()) ** 0.5  # standard deviations
            assert layer.weight.std().item() == pytest.approx(wanted, rel=tolerance)
    by_default = models.ResidualBlock(16, 16, 1, nn.BatchNorm2d).get_parameter("conv1.weight")
    assert by_default.std() < 0.06 < 0.1 < (2 / (9 * 16)) ** 0.5


def test_blocks_that_start_with_zeros_add_nothing() -> None:
    model = models.ImageNetResNet18((3, 64, 64), 7, zero_init_residual=True)
    x = torch.rand(2, 64, 5, 5)
    assert torch.equal(model.blocks[1](x), x)
    assert not torch.equal(models.ImageNetResNet18((3, 64, 64), 7).blocks[1](x), x)


@pytest.mark.long
@pytest.mark.parametrize(
    ("models_of", "name", "before", "after"),
    [
        (models.ARCHITECTURES, "ResNet20", (16, 32, 32), (64, 8, 8)),
        (models.ARCHITECTURES, "ResNet18", (64, 32, 32), (512, 4, 4)),
        # 32 times in all, 4 times before the blocks
        (models.IMAGENET, "ResNet18", (64, 8, 8), (512, 1, 1)),
        (models.IMAGENET, "ResNet50", (64, 8, 8), (2048, 1, 1)),
    ],
)
def test_residual_blocks_halve_the_image_between_stages(
    models_of: dict[str, Any], name: str, before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    with torch.device("meta"):
        model = models_of[name]((3, 32, 32), 10)
        assert model.pool(model.conv(torch.zeros(2, 3, 32, 32))).shape == (2, *before)
        assert model.blocks(torch.zeros(2, *before)).shape == (2, *after)
        vgg11 = models.VGG11((3, 32, 32), 10)
        assert vgg11.layers(torch.zeros(2, 3, 32, 32)).shape == (2, 512, 1, 1)


def test_a_residual_block_adds_its_input() -> None:
    block = models.ResidualBlock(4, 4, 1, models.NORMALIZATIONS["batch"])
    for parameter in block.get_submodule("norm2").parameters():
        nn.init.zeros_(parameter)
    images = torch.randn(2, 4, 5, 5)
    assert torch.equal(block(images), images.relu())
    padded = models.ZeroPadding(4, 6, 2)(images)  # zeros for new channels
    assert torch.equal(padded[:, :4], images[:, :, ::2, ::2])
    assert not padded[:, 4:].any()


def test_plain_vgg11_has_biases_dropout_and_no_normalization() -> None:
    model = models.VGG11((3, 32, 32), 10, plain=True, initialization="fan-out")
    assert not list(model.buffers())
    images = torch.randn(2, 3, 32, 32)
    assert not torch.equal(model(images), model(images))
    assert torch.equal(model.eval()(images), model(images))


@pytest.mark.parametrize("name", ["ResNet20", "VGG11"])
def test_group_norm_makes_images_independent_of_each_other(name: str) -> None:
    images = torch.randn(4, 3, 32, 32)
    model = models.ARCHITECTURES[name]((3, 32, 32), 10, normalization="group")
    assert not list(model.buffers())
    torch.testing.assert_close(model(images)[:2], model(images[:2]), atol=1e-4, rtol=1e-3)
    assert not torch.allclose(model(images)[0], model(images)[1])
    for options in ({}, {"normalization": "batch"}):
        batch = models.ARCHITECTURES[name]((3, 32, 32), 10, **options)
        assert any(isinstance(module, nn.BatchNorm2d) for module in batch.modules())
        assert not torch.allclose(batch(images)[:2], batch(images[:2]), atol=1e-4, rtol=1e-3)


# Language.


def small(name: str, **options: Any) -> language_models.LanguageModel:
    torch.manual_seed(0)
    return language_models.ARCHITECTURES[name]((50, 12), hidden_size=16, num_layers=2, **options)


@pytest.mark.parametrize("name", language_models.ARCHITECTURES)
def test_scores_depend_on_the_words_so_far_and_on_them_only(name: str) -> None:
    model = small(name).eval()
    words = torch.arange(24).view(2, 12)
    scores, _ = model(words, {})
    assert scores.shape == (2, 12, 50)
    changed = words.clone()
    changed[0, 5] = 40
    others, _ = model(changed, {})
    torch.testing.assert_close(others[0, :5], scores[0, :5])
    torch.testing.assert_close(others[1], scores[1])
    assert (others[0, 5:] - scores[0, 5:]).abs().amax(1).min() > 1e-5


def test_the_lstm_continues_where_it_was() -> None:
    model = small("LSTM").eval()
    words = torch.arange(24).view(2, 12)
    at_once, _ = model(words, {})
    first, state = model(words[:, :7], {})
    second, _ = model(words[:, 7:], state)
    torch.testing.assert_close(torch.cat([first, second], 1), at_once)
    assert {name: value.shape for name, value in state.items()} == {
        "hidden": (2, 2, 16),
        "cell": (2, 2, 16),
    }
    assert model.state == {}


@pytest.mark.parametrize("name", language_models.ARCHITECTURES)
def test_the_output_layer_is_the_embedding(name: str) -> None:
    model = small(name).eval()
    shapes = [tuple(p.shape) for p in model.parameters()]
    assert shapes.count((50, 16)) == 1
    (embedding,) = (p for p in model.parameters() if p.shape == (50, 16))
    with torch.no_grad():
        before, _ = model(torch.tensor([[1, 2]]), {})
        embedding[7] *= 3  # of a word that is not in the input: only its own score changes
        after, _ = model(torch.tensor([[1, 2]]), {})
    bias = model.bias[7].item() if isinstance(model, language_models.LSTM) else 0.0
    torch.testing.assert_close(after[..., 7] - bias, 3 * (before[..., 7] - bias))
    torch.testing.assert_close(after[..., :7], before[..., :7])


def test_a_block_of_a_gpt_is_that_of_its_equations() -> None:
    """Rotary positions as products of complex numbers, in float64. They keep the dtype."""
    half = torch.randn(2, 3, 9, 6, dtype=torch.bfloat16)
    assert language_models.rotated(half).dtype == torch.bfloat16
    block = language_models.GPTBlock(16, num_heads=2).double()
    for parameter in block.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 7, 16, dtype=torch.float64)

    def norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return x / x.square().mean(-1, keepdim=True).sqrt() * gain

    def turned(x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(7)[:, None] * 10000 ** (-torch.arange(4, dtype=torch.float64) / 4)
        return torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)

    h, expected = norm(x, block.norm1.weight), x.clone()
    for head in range(2):
        units = slice(8 * head, 8 * head + 8)
        q, k, v = (h @ m.weight[units].T for m in (block.queries, block.keys, block.values))
        products = (turned(q)[:, :, None] * turned(k)[:, None].conj()).sum(-1).real
        future = torch.ones(7, 7).triu(1).bool()
        weights = (products / 8**0.5).masked_fill(future, -torch.inf).softmax(-1)
        expected += weights @ v @ block.attended.weight[:, units].T
    h = norm(expected, block.norm2.weight)
    first, _, last = block.net
    expected += nn.functional.gelu(h @ first.weight.T) @ last.weight.T  # type: ignore[operator]
    torch.testing.assert_close(block(x), expected, rtol=1e-5, atol=1e-4)


def test_dropout_is_where_it_says_and_only_in_training() -> None:
    """Units of embeddings and outputs, and between layers."""
    words = torch.arange(24).view(2, 12)
    model = small("LSTM", dropout=0.5)
    assert isinstance(model, language_models.LSTM)
    assert not torch.equal(model(words, {})[0], model(words, {})[0])
    model.eval()
    assert torch.equal(model(words, {})[0], model(words, {})[0])
    without = small("LSTM", dropout=0.0)
    assert torch.equal(without(words, {})[0], model(words, {})[0])
    dropped: list[torch.Tensor] = []
    model.train().dropout.register_forward_hook(lambda *given: dropped.append(given[2]))
    scores, _ = model(words, {})
    embedded, after_layers = dropped
    kept = embedded != 0
    assert 0.3 < kept.float().mean() < 0.7
    torch.testing.assert_close(embedded[kept], 2 * model.encoder(words)[kept])
    torch.testing.assert_close(scores, after_layers @ model.encoder.weight.T + model.bias)
    assert model.rnn.dropout == 0.5
    assert language_models.LSTM((50, 12), num_layers=1).rnn.dropout == 0  # torch warns


def test_initial_weights_are_those_that_are_documented() -> None:
    lstm = language_models.LSTM((3000, 30), hidden_size=64, num_layers=1)
    assert lstm.encoder.weight.abs().max() <= 0.1
    assert lstm.encoder.weight.std().item() == pytest.approx(0.1 / 3**0.5, rel=0.02)
    assert all(weight.abs().max() <= 1 / 8 for weight in lstm.rnn.parameters())
    assert not lstm.bias.any()
    gpt = language_models.GPT((3000, 30), hidden_size=128, num_layers=8)
    deviation, ends_residual = 0.5 / 128**0.5, ("attended.weight", "net.2.weight")
    for name, parameter in gpt.named_parameters():
        wanted = deviation / (4 if name.endswith(ends_residual) else 1)
        if parameter.dim() == 2:
            assert parameter.std().item() == pytest.approx(wanted, rel=0.05), name
        else:
            assert (parameter == 1).all(), name


@pytest.mark.parametrize("name", language_models.ARCHITECTURES)
def test_models_use_the_flat_buffer_they_are_moved_to(name: str) -> None:
    """An LSTM could keep its weights elsewhere."""
    model = small(name).eval()
    parameters = Parameters([model])
    words = torch.arange(24).view(2, 12)
    model(words, {})[0].square().sum().backward()
    assert all(p.abs().sum() > 0 for p in parameters.layout.tensors(parameters.grad[0]))
    with torch.no_grad():
        parameters.x.zero_()
    assert not model(words, {})[0].any()
