"""Loss of a small language model by the format of its KV cache: float32, bf16, e4m3 and NVFP4.

`python -m lab.measure.nvfp4_loss` trains a transformer of three layers, head_dim 256, on the bytes
of this repository's pages and sources, on the CPU (about eight minutes of one core), and prints the
loss on files that it has not seen. Only K and V are rounded, after rotation, as a cache holds them;
all else is float32. Rows of one text are evaluated together, so that the formats' differences are
those of the same predictions.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from lab.measure.nvfp4 import rounded

LAYERS, WIDTH, HEADS, HEADS_KV, HEAD_DIM = 3, 256, 2, 1, 256
CONTEXT, BATCH = 256, 8
FORMATS = ("float32", "bf16", "e4m3", "NVFP4")
ROOT = Path(__file__).resolve().parents[2]


class Layer(nn.Module):
    """Attention with RMS norms of q and k and rotary embedding, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qk_norms = nn.ModuleList(nn.RMSNorm(HEAD_DIM) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * HEADS_KV) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, form: str) -> torch.Tensor:
        """x: (batch, rows, WIDTH). form: format of K and V."""
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        q, k, v = heads.split((HEADS, HEADS_KV, HEADS_KV), 1)
        q, k = rotated(self.qk_norms[0](q)), rotated(self.qk_norms[1](k))
        if form != "float32":
            k, v = (rounded(t, form).float() for t in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    """A model that predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, text: torch.Tensor, form: str) -> torch.Tensor:
        """Return the loss of each byte but the first, in nats: (batch * (rows - 1),)."""
        x = self.embedding(text[:, :-1])
        for layer in self.layers:
            x = layer(x, form)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten(), reduction="none")


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Return x, (batch, heads, rows, HEAD_DIM), under rotary embedding of base 10,000."""
    first, second = x.chunk(2, -1)
    rates = 1e4 ** -torch.linspace(0, 1, HEAD_DIM // 2)
    angles = torch.arange(x.shape[2])[:, None] * rates
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes to train on, and those of every tenth file, which are held out."""
    files = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("fa4_hd256/**/*.py")])

    def joined(held_out: bool) -> torch.Tensor:
        parts = [f.read_bytes() for n, f in enumerate(files) if (n % 10 == 0) == held_out]
        return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8).long()

    return joined(False), joined(True)


def trained(text: torch.Tensor, steps: int) -> Model:
    """Return a model trained on windows of the text drawn at random; prints its loss."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
    for step in range(steps):
        loss = model(windows(text, torch.randint(len(text) - CONTEXT, (BATCH,))), "float32").mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: {loss.item():.3f} nats a byte", flush=True)
    return model


def windows(text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Return (len(starts), CONTEXT + 1) bytes."""
    return text[starts[:, None] + torch.arange(CONTEXT + 1)]


@torch.no_grad()
def losses(model: Model, text: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the loss of each held-out byte by format."""
    starts = torch.arange(0, len(text) - CONTEXT - 1, CONTEXT)[: 16 * BATCH]
    parts = windows(text, starts).split(BATCH)
    return {form: torch.cat([model(part, form) for part in parts]) for form in FORMATS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600, help="training steps of 2,048 bytes")
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    text, held_out = texts()
    found = losses(trained(text, steps), held_out)
    exact = found["float32"]
    for form, loss in found.items():
        more = loss - exact
        error = more.std() / math.sqrt(len(more))
        print(
            f"{form}: {loss.mean():.4f} nats a byte, perplexity {loss.mean().exp():.4f}, "
            f"{more.mean():+.5f} (standard error {error:.5f})"
        )


if __name__ == "__main__":
    main()
