"""Rounds of FedAvg with an LSTM over words: a plain PyTorch loop and selffl's ways.

Two layers of 256 on frozen embeddings of 30,000 words in 100 dimensions, sentences of 25 words, 4 steps of batch 10;
77 clients a round.
"""

from __future__ import annotations

from functools import partial

import torch
from timing import Case, measured, options, report, threads_of
from torch import Tensor, nn

from selffl.algorithms import algorithm
from selffl.data.federation import Federation, Rows
from selffl.engines.cohort import CohortEngine
from selffl.training.model import FlatModel, ModelSource

NUM_DIMENSIONS, NUM_CLASSES, LEARNING_RATE = 100, 2, 0.1
WAYS = ("auto", "vmap", "loop")


class Reader(nn.Module):
    """Frozen embeddings, an LSTM, and a linear layer on its last output."""

    def __init__(self, num_words: int, hidden: int, num_layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(num_words, NUM_DIMENSIONS).requires_grad_(False)
        self.memory = nn.LSTM(NUM_DIMENSIONS, hidden, num_layers, batch_first=True)
        self.head = nn.Linear(hidden, NUM_CLASSES)

    def forward(self, rows: Tensor) -> Tensor:
        """Logits ``[B, classes]`` of words ``[B, T]``."""
        return self.head(self.memory(self.words(rows))[0][:, -1])


def main() -> None:
    """Measure and print."""
    parser = options(__doc__, repeats=5)
    parser.add_argument("--turns", type=int, dest="repeats", help="the same as --repeats")
    parser.add_argument("--clients", type=int, nargs="+", default=[77], help="a round; several are measured in turn")
    parser.add_argument("--rows", type=int, default=40, help="of each client")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--words", type=int, default=30_000, help="with an embedding")
    parser.add_argument("--length", type=int, default=25, help="of a sentence, in words")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--ways", nargs="+", default=["vmap"], choices=WAYS)
    args = parser.parse_args()

    torch.manual_seed(0)
    features = torch.randint(args.words, (max(args.clients) * args.rows, args.length), device=args.device)
    labels = torch.randint(NUM_CLASSES, (len(features),), device=args.device)
    own = list(zip(features.split(args.rows), labels.split(args.rows), strict=True))
    model = Reader(args.words, args.hidden, args.layers).to(args.device)
    trained = [part for part in model.parameters() if part.requires_grad]
    optimiser, criterion = torch.optim.SGD(trained, lr=LEARNING_RATE), nn.CrossEntropyLoss()
    shared = [part.detach().clone() for part in trained]

    def loop(cohort: int) -> None:
        total = [torch.zeros_like(part) for part in shared]
        for client in range(cohort):
            with torch.no_grad():
                torch._foreach_copy_(trained, shared)
            left = args.steps
            while left:
                order = torch.randperm(args.rows, device=args.device)
                batches = zip(*(tensor[order].split(args.batch) for tensor in own[client]), strict=True)
                for _, (x, y) in zip(range(left), batches, strict=False):
                    optimiser.zero_grad()
                    criterion(model(x), y).backward()
                    optimiser.step()
                    left -= 1
            with torch.no_grad():
                torch._foreach_add_(total, trained, alpha=1 / cohort)
        torch._foreach_copy_(shared, total)

    def selffl(engine: CohortEngine, params: Tensor) -> None:
        engine.advance(engine.start(params), 1)

    threads = threads_of(args)
    seconds, baselines = {}, {}
    for cohort in args.clients:
        offset = torch.arange(cohort + 1, device=args.device) * args.rows
        rows = Rows(features[: cohort * args.rows], labels[: cohort * args.rows], offset)
        cases: dict[str, Case] = {"loop": partial(loop, cohort)}
        for way in args.ways:
            flat = FlatModel(Reader(args.words, args.hidden, args.layers).to(args.device))
            source = ModelSource(
                Federation(range(cohort), rows, rows), flat, nn.functional.cross_entropy, LEARNING_RATE, args.batch,
                gradients=way,
            )  # fmt: skip
            engine = CohortEngine(algorithm("fedavg", num_local_steps=args.steps), source)
            cases[f"selffl {way}"] = partial(selffl, engine, flat.params)
        for number in threads:
            torch.set_num_threads(number)
            found = measured(cases, args)
            suffix = f", {cohort} clients, {number} thr."
            seconds |= {name + suffix: values for name, values in found.items()}
            baselines |= {name + suffix: "loop" + suffix for name in found}
    sizes = f"{args.layers} layers of {args.hidden}, {args.length} words, {args.steps} steps of batch {args.batch}"
    report(f"One round of FedAvg, LSTM: {sizes}", seconds, baselines, args, threads=threads)


if __name__ == "__main__":
    main()
