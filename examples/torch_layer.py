"""A causal transformer block of linear attention, trained for some steps on data it makes itself.

The task is recall: a sequence shows pairs of a key and a value in random order, then asks for the
value of each key. Only attention can answer, since keys and values are paired anew in each
sequence. It prints the loss as it falls.

    python examples/torch_layer.py                  # a few seconds on a CPU
    python examples/torch_layer.py --compile        # the same through torch.compile
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from la_cupy.interop.torch import linear_attention
from torch import Tensor, nn
from tqdm import tqdm

SYMBOLS, PAIRS, WIDTH, HEADS = 16, 6, 64, 4


class Attention(nn.Module):  # type: ignore[misc]
    """Causal linear attention; q, k and v are views of one projection, and are not copied."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, rows, width = x.shape
        fused = self.project(x).view(batch, rows, 3, self.heads, width // self.heads)
        q, k, v = (fused[:, :, i].transpose(1, 2) for i in range(3))  # (B, H, N, D)
        # recall needs sharp weights: products of exponentials, with neither norm nor constant
        out = linear_attention(q, k, v, causal=True, a=0.0, feature_map="exp", qk_norm=None)
        return self.output(out.transpose(1, 2).reshape(batch, rows, width))


class Block(nn.Module):  # type: ignore[misc]
    """Attention, then a perceptron, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = Attention(width, heads)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.perceptron(self.norms[1](x))


class Model(nn.Module):  # type: ignore[misc]
    """Pairs (key, value) in, a guess at the value out; value 0 means a question."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.keys = nn.Embedding(SYMBOLS, WIDTH)
        self.values = nn.Embedding(SYMBOLS + 1, WIDTH)
        self.blocks = nn.Sequential(*(Block(WIDTH, HEADS) for _ in range(layers)))
        self.guess = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, keys: Tensor, values: Tensor) -> Tensor:
        return self.guess(self.blocks(self.keys(keys) + self.values(values)))


def make_batch(size: int, generator: Any, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """(keys, values, answers): PAIRS pairs, then the same keys in another order, to be answered."""
    scores = torch.rand((size, SYMBOLS), generator=generator, device=device)
    keys = scores.argsort(-1)[:, :PAIRS]
    values = torch.randint(SYMBOLS, (size, PAIRS), generator=generator, device=device)
    order = torch.rand((size, PAIRS), generator=generator, device=device).argsort(-1)
    asked, answers = keys.gather(1, order), values.gather(1, order)
    return torch.cat((keys, asked), 1), torch.cat((values + 1, 0 * asked), 1), answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--compile", action="store_true", help="run through torch.compile")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device)
    arguments = parser.parse_args()
    device = arguments.device

    torch.manual_seed(0)
    generator = torch.Generator(device).manual_seed(0)
    model = Model(arguments.layers).to(device)
    run = torch.compile(model, fullgraph=True) if arguments.compile else model
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)

    losses = []
    with tqdm(total=arguments.steps, desc=f"training on {device}", mininterval=0.5) as progress:
        for step in range(arguments.steps):
            keys, values, answers = make_batch(arguments.batch, generator, device)
            guesses = run(keys, values)[:, PAIRS:]
            loss = nn.functional.cross_entropy(guesses.flatten(0, 1), answers.flatten())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.detach())
            progress.update()
            if (step + 1) % max(1, arguments.steps // 5) == 0:
                progress.write(f"step {step + 1:4d}: loss {float(losses[-1]):.3f}")
    right = float((guesses.argmax(-1) == answers).float().mean())
    print(f"loss {float(losses[0]):.3f} -> {float(losses[-1]):.3f}, {right:.0%} recalled")


if __name__ == "__main__":
    main()
