"""A module with three inputs by name, rows for it, and the rounds of FedAvg as anybody would write them."""

import copy

import torch
from torch import nn

import selffl

CLIENTS = ("anna", "ben", "carl")


class Towers(nn.Module):
    """Words that are not padding, an image and an age, each of its own type; scores in a dictionary."""

    def __init__(self):
        super().__init__()
        self.words, self.image = nn.Embedding(12, 4), nn.Conv2d(1, 3, 3)
        self.body, self.head = nn.Linear(8, 5), nn.Linear(5, 3)

    def forward(self, words, image, age, is_word=None):
        kept = torch.ones_like(words, dtype=torch.bool) if is_word is None else is_word
        told = (self.words(words) * kept.unsqueeze(-1)).sum(1) / kept.sum(1, keepdim=True)
        seen = torch.cat([told, self.image(image).mean((2, 3)), (age.to(told.dtype) / 50)[:, None]], 1)
        return {"hidden": seen, "logits": self.head(self.body(seen).tanh())}


def towers(kind=Towers):
    torch.manual_seed(0)
    return kind()


def rows(number=48):
    drawn = torch.Generator().manual_seed(0)
    return {
        "words": torch.randint(0, 12, (number, 5), generator=drawn),
        "is_word": torch.arange(5) < torch.randint(1, 6, (number, 1), generator=drawn),
        "image": torch.randn(number, 1, 6, 6, generator=drawn, dtype=torch.float64),
        "age": torch.randint(18, 90, (number,), generator=drawn),
    }


def federation(**changed):
    number = len(rows()["age"])
    client = [*CLIENTS, "carl"] * (number // 4)
    return selffl.Federation.from_arrays({**rows(), **changed}, torch.arange(number) % 3, client, test_fraction=0.25)


class Packed(Towers):
    """The same function of the same numbers, in one tensor of float64 that it takes apart."""

    def forward(self, x):
        words, is_word, image, age = x.split([5, 5, 36, 1], 1)
        return super().forward(words.long(), image.view(-1, 1, 6, 6), age[:, 0], is_word > 0)["logits"]


def packed(x):
    order = ("words", "is_word", "image", "age")
    return torch.cat([x[name].double().reshape(len(x[name]), -1) for name in order], 1)


def plain_rounds(module, run, num_rounds, steps, rate):
    """Each client in turn, by torch's own autograd and optimiser, and their models averaged by rows."""
    sizes = run.federation.train.num_examples.tolist()
    for number in range(1, num_rounds + 1):
        trained = []
        for client in range(len(sizes)):
            own = copy.deepcopy(module).train()
            optimiser = torch.optim.SGD(own.parameters(), lr=rate)
            task = run._session.source.task(torch.tensor([client]), number)
            for draw in range(steps):
                x, y = task.batch(draw, torch.tensor([0]))
                optimiser.zero_grad()
                answer = own(**{name: entry[0] for name, entry in x.items()})
                nn.functional.cross_entropy(answer["logits"], y[0]).backward()
                optimiser.step()
            trained.append(own.state_dict())
        for name, entry in module.state_dict().items():
            if entry.is_floating_point():
                entry.copy_(sum(w * each[name] for w, each in zip(sizes, trained, strict=True)) / sum(sizes))
    return module.eval()
