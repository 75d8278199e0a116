"""How sure the personal models of a run are: probabilities, moderated by what the posterior leaves open.

The normal posterior by itself is too wide: its prior gives every direction of a group of parameters the same variance,
those in which no two clients differ, too.  What it says of a row *left out* holds up (docs/research.md), and is there
for every row that was trained on.  So the labels of these rows decide, for all clients together, how much of the
variance counts, and by how much log-odds are too small or too large throughout: two numbers, and no row is set aside
for them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from selffl.algorithms.layers import by_parameter
from selffl.algorithms.suggestions import suggest
from selffl.data.federation import Rows
from selffl.data.named import Features, join
from selffl.errors import ConfigError, DataError
from selffl.maths.calibration import brier_score, calibration_error, log_loss
from selffl.maths.confidence import (
    Moderation,
    information,
    learned_moderation,
    left_out,
    log_odds,
    log_odds_variance,
    moderate,
)
from selffl.randomness import uniform
from selffl.runs.evaluation import of_clients
from selffl.runs.folder import Row
from selffl.runs.personal import PersonalModelCache
from selffl.training.tangents import Tangents, check_classifies, class_labels

MAX_ROWS = 200  # of a client's training rows that its posterior is made of
MAX_CLIENTS = 100  # whose rows, left out, decide how much of the posterior counts


class _Own(NamedTuple):
    """A client's posterior: what it was trained on, as its own model sees it."""

    features: Features  # [n, ...]
    classes: Tensor  # [n]
    weights: Tensor  # the information in each label [n]
    chance: Tensor  # of each label [n]


class Confidence:
    """What the models of a run say of rows, as probabilities; ``moderation`` is learned where it is not given."""

    def __init__(self, models: PersonalModelCache, moderation: Moderation | None = None) -> None:
        session = models.session
        check_classifies(session.measure, session.source.loss)
        self._models, self._session, self._state = models, session, models.state
        self._rows = session.source.federation.train
        self._moderation = moderation

    @property
    def has_posterior(self) -> bool:
        """Whether the method has learned how much clients differ."""
        return self._session.method.information_balance is not None

    @property
    def moderation(self) -> Moderation:
        """The moderation of all clients, learned when it is first asked for."""
        if not self.has_posterior:
            names = suggest(lambda other: other.information_balance is not None)
            raise ConfigError(
                f"{self._session.recipe.algorithm} does not know how sure its models are; expected a method that "
                f"learns how much clients differ, such as {names}. Train with it, or ask for "
                "moderated=False."
            )
        if self._moderation is None:
            self._moderation = self._learn_moderation()
        return self._moderation

    def tangents(self, position: int | None) -> Tangents:
        """The model of a client, or the global one."""
        method = self._session.method
        params = method.global_model(self._state.server) if position is None else self._models[position]
        return Tangents(self._session.model, params, self._session.measure, self._session.recipe.gradients)

    def logits(self, position: int | None, features: Features, is_moderated: bool = False) -> Tensor:
        """Logits of classes ``[rows, K]``, by a client's model or the global one."""
        moderation = self.moderation if is_moderated else None
        own = self.tangents(position)
        logits = own.logits(features)
        if moderation is None or position is None or not len(features):
            return logits
        return moderate(logits, self._variance(position, own, features, logits.argmax(-1)), moderation)

    def _prior(self) -> tuple[Tensor, Tensor]:
        """The variance of the prior of personal models, and by how much more or less each group varies."""
        prior = self._session.method.closing_prior(self._state.server)
        assert prior is not None
        return prior

    def _precision(self) -> float:
        """c of all parameters; products of gradients know how much more or less each varies."""
        return 1.0 / float(self._prior()[0])

    def _products(
        self, tangents: Tangents, left: tuple[Features, Tensor], right: tuple[Features, Tensor]
    ) -> tuple[Tensor, Tensor]:
        ratios = by_parameter(self._prior()[1].double(), self._state.server.group_sizes)
        return tangents.products(left, right, ratios)

    def _own(self, position: int, tangents: Tangents) -> _Own:
        """At most so many of a client's rows, by lot; none if it has never trained: its model knows none of them."""
        low, high = self._rows.offset[position : position + 2].tolist()
        has_trained = int(self._state.num_rounds[position]) > 0
        lots = uniform(self._session.recipe.seed, "confidence", position, torch.arange(high - low))
        chosen = low + lots.argsort(stable=True)[: MAX_ROWS if has_trained else 0].sort().values
        chosen = chosen.to(self._rows.offset.device)
        features = self._rows.features[chosen]
        classes = class_labels(self._rows.labels[chosen], self._session.measure)
        chance = log_odds(tangents.logits(features), classes).sigmoid() if len(chosen) else classes.new_zeros(0)
        balance = self._session.method.information_balance
        assert balance is not None
        return _Own(features, classes, information(chance.double(), balance), chance.double())

    def _variance(self, position: int, tangents: Tangents, features: Features, classes: Tensor) -> Tensor:
        """s^2 of the log-odds of ``classes [rows]``."""
        own = self._own(position, tangents)
        right = join([own.features, features]), torch.cat([own.classes, classes])
        products, squares = self._products(tangents, (own.features, own.classes), right)
        num = len(own.classes)
        return log_odds_variance(squares[num:], products[:, num:], products[:, :num], own.weights, self._precision())

    def _learn_moderation(self) -> Moderation:
        """Learn the moderation from the rows of clients that have trained, some of them by lot if they are many."""
        trained = self._state.num_rounds.cpu().nonzero().flatten()
        lots = uniform(self._session.recipe.seed, "confidence", trained)
        logits, labels, variance = [], [], []
        for position in trained[lots.argsort(stable=True)[:MAX_CLIENTS]].tolist():
            tangents = self.tangents(position)
            own = self._own(position, tangents)
            side = own.features, own.classes
            gram, _ = self._products(tangents, side, side)
            without = left_out(gram, own.weights, own.chance, self._precision())
            found = tangents.logits(own.features)
            logits.append(found.scatter_add(-1, own.classes[:, None], -without.shift[:, None]))
            labels.append(own.classes)
            variance.append(without.variance)
        return learned_moderation(torch.cat(logits), torch.cat(labels), torch.cat(variance))

    def given(self, features: Any) -> Features:
        """The user's rows as the model takes them."""
        return self._session.inputs_of(features)

    def held_out(self, position: int) -> Rows:
        """The rows of a client that the run is evaluated on."""
        return of_clients(self._session.evaluated, position, position + 1)

    def table(self) -> list[Row]:
        """Every client's held-out rows: the personal models as they are and moderated, and the global one, if any."""
        evaluated = self._session.evaluated
        if not len(evaluated.labels):
            raise DataError("there are no held-out rows; expected some. Make the federation with a test_fraction.")
        labels = class_labels(evaluated.labels, self._session.measure)
        has_rows = evaluated.num_examples.nonzero().flatten().tolist()
        kinds = [("personal", False)]
        if self.has_posterior:
            kinds.append(("personal", True))
        if self._session.method.has_global_model:
            kinds.append(("global", False))
        lines = []
        for model, is_moderated in kinds:
            found = [
                self.logits(position if model == "personal" else None, self.held_out(position).features, is_moderated)
                for position in has_rows
            ]
            chances = torch.cat(found).softmax(-1)
            confidence, answer = chances.max(-1)
            lines.append(
                {
                    "model": model,
                    "moderated": is_moderated,
                    "rows": len(labels),
                    "accuracy": float((answer == labels).double().mean()),
                    "confidence": float(confidence.mean()),
                    "calibration_error": calibration_error(chances, labels),
                    "even_calibration_error": calibration_error(chances, labels, even=True),
                    "log_loss": log_loss(chances, labels),
                    "brier_score": brier_score(chances, labels),
                }
            )
        return lines
