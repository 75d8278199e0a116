"""Rounds of FedAvg with low-rank adapters of a frozen transformer: a plain PyTorch loop and selffl's ways.

The loop trains a module of peft's where that is installed, else the same module as selffl.  About 12 x layers x width^2
frozen parameters; 16 layers of 512 are 50 million.
"""

from __future__ import annotations

import copy
import importlib.util

import torch
from rounds import WAYS, compare, compare_each, size_options
from timing import options
from torch import Tensor, nn

from selffl.adapters import lora

NUM_CLASSES, HEADS, LEARNING_RATE = 10, 8, 0.05
TARGETS = ["query", "value", "first", "second"]


class Block(nn.Module):
    """Attention and two linear layers, each of them a module that peft knows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, rows: Tensor) -> Tensor:
        """``[B, places, width]``."""
        inner = self.before(rows)
        heads = [
            part(inner).reshape(*inner.shape[:-1], HEADS, -1).transpose(-2, -3)
            for part in (self.query, self.key, self.value)
        ]
        mixed = nn.functional.scaled_dot_product_attention(*heads).transpose(-2, -3)
        rows = rows + self.out(mixed.flatten(-2))
        return rows + self.second(nn.functional.gelu(self.first(self.between(rows))))


class Transformer(nn.Module):
    """Blocks, and a linear layer on the mean over places."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, rows: Tensor) -> Tensor:
        """Logits ``[B, classes]`` of rows ``[B, places, width]``."""
        return self.head(self.blocks(rows).mean(-2))


def main() -> None:
    """Measure and print."""
    parser = options(__doc__, repeats=5)
    parser.add_argument("--clients", type=int, nargs="+", default=[20], help="a round; several are measured in turn")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=16, help="of a row, in places")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--ways", nargs="+", default=["auto"], choices=WAYS)
    parser.add_argument("--each", nargs="+", help="ways, such as stacked or stacked:8, measured one by one with memory")
    size_options(parser, rows=32, steps=4, batch=8)
    args = parser.parse_args()
    torch.manual_seed(0)
    features = torch.randn(max(args.clients) * args.rows, args.length, args.width, device=args.device)
    labels = torch.randint(NUM_CLASSES, (len(features),), device=args.device)
    body = Transformer(args.width, args.layers).eval()

    def adapted() -> nn.Module:
        return lora(body, args.rank, TARGETS)

    def of_peft() -> nn.Module:
        import peft

        config = peft.LoraConfig(r=args.rank, lora_alpha=args.rank, target_modules=TARGETS, modules_to_save=["head"])
        module = peft.get_peft_model(copy.deepcopy(body), config).eval()
        for name, part in module.named_parameters():
            if ".lora_A." in name:
                part.requires_grad_(False)
        return module

    has_peft = importlib.util.find_spec("peft") is not None
    size = sum(part.numel() for part in body.parameters())
    title = f"adapters of rank {args.rank}, {size / 1e6:.1f} million frozen parameters, {args.length} places, "
    title += f"{args.steps} steps of batch {args.batch}; the loop by {'peft' if has_peft else 'a plain module'}"
    rows, build_plain = (features, labels), of_peft if has_peft else None
    if args.each:
        for cohort in args.clients:
            compare_each(title, adapted, rows, cohort, LEARNING_RATE, args, build_plain)
    else:
        compare(title, adapted, rows, args.clients, LEARNING_RATE, args, build_plain)


if __name__ == "__main__":
    main()
