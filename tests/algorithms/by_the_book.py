"""Rounds of federated learning as anybody would write them: modules, `torch.optim` and state dicts, client by client.

Nothing of the library is used: minibatches are handed in, and so is what makes an optimiser.
"""

import copy

import torch
from torch import nn

BODY_ALONE = ("fedrep",)  # methods whose heads are not averaged
CROSS_ENTROPY = nn.functional.cross_entropy


class Book:
    """A run of FedAvg, DITTO or FedRep.

    ``make(params)`` makes an optimiser, anew in every round unless optimisers are kept.  ``batches(t, m)`` gives the
    minibatches of client m in round t (from 0 up), by number.  ``rate(t)`` is the learning rate of a round.
    """

    def __init__(self, module, weights, batches, make, *, rate, clip=None, keeps=False, penalty=1.0, head=""):
        self.shared, self.weights, self.batches, self.make = copy.deepcopy(module), weights, batches, make
        self.rate, self.clip, self.keeps, self.penalty, self.head = rate, clip, keeps, penalty, head
        self.own = {}  # modules by role and client
        self.optimisers = {}

    def module(self, role, m):
        return self.own.setdefault((role, m), copy.deepcopy(self.shared))

    def steps(self, role, module, m, t, draws, parts=None, anchor=None):
        """Local steps of a module on minibatches; only ``parts`` of its parameters move."""
        chosen = list(module.parameters()) if parts is None else parts
        if (role, m) not in self.optimisers or not self.keeps:
            self.optimisers[role, m] = self.make(chosen)
        optimiser = self.optimisers[role, m]
        for group in optimiser.param_groups:
            group["lr"] = self.rate(t)
        batch = self.batches(t, m)
        for draw in draws:
            features, labels = batch(draw)
            module.zero_grad(set_to_none=False)
            CROSS_ENTROPY(module(features), labels).backward()
            if self.clip is not None:
                nn.utils.clip_grad_norm_(chosen, self.clip)
            if anchor is not None:
                with torch.no_grad():
                    for part, other in zip(module.parameters(), anchor.parameters(), strict=True):
                        part.grad += self.penalty * (part - other)
            optimiser.step()

    def average(self, cohort, modules, names=None):
        total = sum(self.weights[m] for m in cohort)
        states = [module.state_dict() for module in modules]
        mean = {
            name: sum(self.weights[m] / total * state[name] for m, state in zip(cohort, states, strict=True))
            for name in states[0]
            if names is None or name in names
        }
        self.shared.load_state_dict(self.shared.state_dict() | mean)

    def fedavg(self, cohort, t, num_steps):
        sent = []
        for m in cohort:
            module = self.module("shared", m)
            module.load_state_dict(self.shared.state_dict())
            self.steps("shared", module, m, t, range(num_steps))
            sent.append(module)
        return sent

    def ditto(self, cohort, t, num_steps):
        for m in cohort:
            self.steps("personal", self.module("personal", m), m, t, range(num_steps), anchor=self.shared)
        return self.fedavg(cohort, t, num_steps)

    def fedrep(self, cohort, t, num_steps, head_steps):
        sent = []
        for m in cohort:
            module = self.module("personal", m)
            body = {name: part for name, part in self.shared.state_dict().items() if not name.startswith(self.head)}
            module.load_state_dict(module.state_dict() | body)
            named = dict(module.named_parameters())
            heads = [part for name, part in named.items() if name.startswith(self.head)]
            bodies = [part for name, part in named.items() if not name.startswith(self.head)]
            self.steps("head", module, m, t, range(head_steps), heads)
            self.steps("body", module, m, t, range(head_steps, head_steps + num_steps), bodies)
            sent.append(module)
        return sent

    def run(self, method, cohorts, **steps):
        for t, cohort in enumerate(cohorts):
            # DITTO's personal model begins at the global one of the client's first round.
            sent = getattr(self, method)(cohort, t, **steps)
            names = None
            if method in BODY_ALONE:
                names = {name for name in self.shared.state_dict() if not name.startswith(self.head)}
            self.average(cohort, sent, names)
        return self
