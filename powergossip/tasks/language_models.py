"""Language models: words [stream, position] → scores of the next word [stream, position, word].

Words are indices into a vocabulary (int64). Further axis names: layer, unit, head.

`ARCHITECTURES` maps names to builders, `Shape` → model. The keyword-only parameters of a builder
are options of the task. `SMALL_ARCHITECTURES` has the same with defaults for short texts.
"""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

# cuDNN copies the weights of an LSTM to contiguous memory, in cuDNN's own order, at each call.
# flatten_parameters() would do so once, but would detach them from the flat buffer of
# parameters.py.
warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous")

Shape = tuple[int, int]  # words in the vocabulary, words in the longest sequence
State = dict[str, Tensor]


class LanguageModel(nn.Module, ABC):
    """A language model with a state that may be carried from batch to batch.

    Attributes:
        state: The carried state, which is neither parameter nor buffer. Only the task sets it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.state: State = {}

    @abstractmethod
    def forward(self, words: Tensor, state: State) -> tuple[Tensor, State]:
        """Words and the state before them → scores and the state after them.

        {} is the initial state. self.state is neither read nor changed.
        """

    def hidden_matrices(self) -> list[str]:
        """The names of all matrices but embeddings, whose weights the output layer shares."""
        embeddings = {
            f"{name}.weight" for name, m in self.named_modules() if isinstance(m, nn.Embedding)
        }
        return [n for n, p in self.named_parameters() if p.ndim >= 2 and n not in embeddings]


class LSTM(LanguageModel):
    """Embedding, LSTM layers, and an output layer that shares the embedding's weights, with a bias.

    Dropout follows the embedding and each layer. 28,949,319 parameters for 28,869 words.

    Names and initial weights follow PyTorch's example word_language_model, on which the PowerGossip
    paper's model is based: embedding uniform in ±0.1, bias 0, LSTM layers as torch initializes
    them.

    References:
        - Zaremba et al. (2014), arXiv:1409.2329.
        - Press & Wolf (2016), arXiv:1608.05859, for the shared weights.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        hidden_size: int = 650,
        num_layers: int = 3,
        dropout: float = 0.4,
    ) -> None:
        super().__init__()
        n_words, _ = shape
        self.dropout = nn.Dropout(dropout)
        self.encoder = nn.Embedding(n_words, hidden_size)
        self.rnn = nn.LSTM(
            hidden_size,
            hidden_size,
            num_layers,
            dropout=dropout if num_layers > 1 else 0,  # between layers
            batch_first=True,
        )
        self.bias = nn.Parameter(torch.zeros(n_words))
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)

    def forward(self, words: Tensor, state: State) -> tuple[Tensor, State]:
        """The state: hidden and cell, each [layer, stream, unit]."""
        x = self.dropout(self.encoder(words))
        x, (hidden, cell) = self.rnn(x, (state["hidden"], state["cell"]) if state else None)
        scores = functional.linear(self.dropout(x), self.encoder.weight, self.bias)
        return scores, {"hidden": hidden, "cell": cell}


class GPT(LanguageModel):
    """Decoder-only transformer with RMSNorm, rotary positions and no biases. It has no state.

    The output layer shares the weights of the embedding. Norms come before attention and MLP. Q, K
    and V are separate matrices, so that a method that treats matrices treats each by itself.
    Initial weights are normal with standard deviation 1/(2√d), d = hidden_size, divided by √(2L)
    for the last matrix of each residual, L = num_layers. GPT-2 has 0.02 in place of 1/(2√d), about
    the same for its width of 768, which trains slowly at small widths. A model has V d + 12 L d² +
    (2 L + 1) d parameters, V being the number of tokens.

    References:
        - Radford et al. (2019), "Language models are unsupervised multitask learners", for the
          order of the norms and the initial weights.
        - Zhang & Sennrich (2019), arXiv:1910.07467, for RMSNorm.
        - Su et al. (2021), arXiv:2104.09864, for rotary positions.
    """

    def __init__(
        self, shape: Shape, *, hidden_size: int = 64, num_layers: int = 3, num_heads: int = 4
    ) -> None:
        """Raises ValueError unless the units of a head, hidden_size / num_heads, are even."""
        super().__init__()
        n_words, _ = shape
        if hidden_size % (2 * num_heads):
            raise ValueError(
                f"task_options.hidden_size={hidden_size}: use a multiple of {2 * num_heads}, twice "
                "num_heads"
            )
        self.words = nn.Embedding(n_words, hidden_size)
        self.blocks = nn.Sequential(*(GPTBlock(hidden_size, num_heads) for _ in range(num_layers)))
        self.norm = nn.RMSNorm(hidden_size)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                ends_residual = name.endswith(("attended.weight", "net.2.weight"))
                factor = math.sqrt(2 * num_layers) if ends_residual else 1.0
                nn.init.normal_(parameter, std=0.5 / math.sqrt(hidden_size) / factor)

    def forward(self, words: Tensor, state: State) -> tuple[Tensor, State]:
        x = self.norm(self.blocks(self.words(words)))
        return functional.linear(x, self.words.weight), {}


class GPTBlock(nn.Module):
    """x ← x + attention(norm(x)); x ← x + net(norm(x)).    x: [stream, position, unit]"""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.RMSNorm(hidden_size)
        self.queries = nn.Linear(hidden_size, hidden_size, bias=False)
        self.keys = nn.Linear(hidden_size, hidden_size, bias=False)
        self.values = nn.Linear(hidden_size, hidden_size, bias=False)
        self.attended = nn.Linear(hidden_size, hidden_size, bias=False)
        self.norm2 = nn.RMSNorm(hidden_size)
        self.net = nn.Sequential(
            nn.Linear(hidden_size, 4 * hidden_size, bias=False),
            nn.GELU(),
            nn.Linear(4 * hidden_size, hidden_size, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.net(self.norm2(x))

    def attention(self, x: Tensor) -> Tensor:
        """Causal multi-head attention, with q and k rotated by their positions."""
        # q, k, v: [stream, head, position, unit of head]
        q, k, v = (
            layer(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.queries, self.keys, self.values)
        )
        heads = functional.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        return self.attended(heads.transpose(1, 2).flatten(2))


def rotated(x: Tensor) -> Tensor:
    """Rotary positions: (x_j, x_{j + d/2}) of position t, rotated by the angle t · 10000^(−2j/d).

    Products qᵀk of rotated vectors depend on the difference of their positions only. The angles are
    computed in float32, and the result has the dtype of x.

    Args:
        x: Queries or keys `[..., position, unit]`, d units.

    References:
        Su et al. (2021), arXiv:2104.09864, eq. 15, for other pairs of units.
    """
    n_positions, d = x.shape[-2:]
    t = torch.arange(n_positions, dtype=torch.float32, device=x.device)
    frequencies = 10000 ** (-torch.arange(0, d, 2, dtype=torch.float32, device=x.device) / d)
    angles = torch.outer(t, frequencies)  # [position, unit / 2]
    sin, cos = angles.sin().to(x.dtype), angles.cos().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


ARCHITECTURES: dict[str, Callable[..., LanguageModel]] = {
    "LSTM": LSTM,
    "GPT": GPT,
}
SMALL_ARCHITECTURES = ARCHITECTURES | {
    "LSTM": partial(LSTM, hidden_size=128, num_layers=1, dropout=0.2)
}
