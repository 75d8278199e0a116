"""Federated training behind scikit-learn's interface: ``fit(X, y, client=ids)``, ``predict(X, client=ids)``.

Reached as `selffl.SelfFLClassifier` and `selffl.SelfFLRegressor`; scikit-learn is imported when one is asked for.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
from torch import Tensor, nn

from selffl.algorithms import DEFAULT_ALGORITHM
from selffl.data.columns import column_of, number_ids
from selffl.data.federation import Federation
from selffl.errors import ConfigError, DataError, first_few
from selffl.maths.steps import largest_step
from selffl.randomness import draw_network
from selffl.runs.methods import Method, named_method
from selffl.runs.recipe import check_settings
from selffl.runs.run import Run
from selffl.runs.train import train
from selffl.training.flat import FlatModel
from selffl.training.losses import squared_error

DEFAULT_LEARNING_RATE = 0.1  # of local steps, where nobody says otherwise
SMALL_LEARNING_RATE = 1e-4  # below it a warning says that steps are small

Array = npt.NDArray[Any]
Model = str | nn.Module | Callable[[Any, int], nn.Module]


class _InputError(DataError, ValueError):
    """Rows that cannot be learned from; scikit-learn expects a ValueError."""


class _Estimator(BaseEstimator):  # type: ignore[misc]
    """What classifier and regressor share."""

    def __init__(
        self,
        model: Model | None = None,
        algorithm: str | Method = DEFAULT_ALGORITHM,
        *,
        rounds: int = 50,
        participation: float = 1.0,
        learning_rate: float | None = None,
        batch_size: int = 20,
        standardise: bool = True,
        device: str = "cpu",
        random_state: int | np.random.RandomState | None = 0,
    ) -> None:
        self.model = model
        self.algorithm = algorithm
        self.rounds = rounds
        self.participation = participation
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.standardise = standardise
        self.device = device
        self.random_state = random_state

    def _check_rows(self, x: Any, *y: Any, **options: Any) -> Any:
        """Rows as scikit-learn checks them; beyond two axes only for a model of the user's own."""
        return validate_data(self, x, *y, dtype=np.float64, allow_nd=self.model is not None, **options)

    def _train(
        self, x: Array, target: Tensor, client: Any, model: nn.Module | str, loss: Callable[..., Tensor]
    ) -> None:
        """Train on rows of those clients, and keep what predictions need."""
        self._has_clients = client is not None
        column = column_of(np.full(len(x), "all") if client is None else client)
        if len(column) != len(x):
            raise _InputError(f"X has {len(x)} rows and client {len(column)}; expected as many of each.")
        rows = x if self.standardise else x.astype(np.float32)
        federation = Federation.from_arrays(rows, target, column, test_fraction=0.0, standardise=self.standardise)
        known = federation.preparation
        self.mean_: Array = np.zeros(x.shape[1:]) if known is None else known.means
        self.scale_: Array = np.ones(x.shape[1:]) if known is None else known.scales
        run: Run = train(
            model,
            federation,
            self.algorithm,
            rounds=self.rounds,
            participation=self.participation,
            learning_rate=self._rate(federation) if self.learning_rate is None else self.learning_rate,
            batch_size=self.batch_size,
            seed=self._seed,
            device=self.device,
            loss=loss,
            evaluate_every=0,
        )
        self.run_ = run
        self.clients_ = list(run.federation.clients)
        # A row has the same prediction whatever is asked beside it: to the last digits that are shown, in double.
        trained = run._session.model
        self._flat = FlatModel(copy.deepcopy(trained.module).to("cpu", torch.float64), trained.batch_norm)
        self._shared = run._global_params.cpu().double()
        self._personal = run._session.personal_models(run._state).cpu().float()

    def _rate(self, federation: Federation) -> float:
        """Learning rate of the local steps, where none was asked for."""
        del federation
        return DEFAULT_LEARNING_RATE

    def _outputs(self, x: Any, client: Any) -> Tensor:
        """Outputs for each row, by its client's model, or by the global one without a client that was there."""
        check_is_fitted(self)
        checked = self._check_rows(x, reset=False)
        rows = torch.tensor((checked - self.mean_) / self.scale_)
        if client is None:
            params = self._shared if self._has_clients else self._personal[0].double()
            with torch.no_grad():
                return self._flat(params, rows)
        column = column_of(client)
        if len(column) != len(rows):
            raise _InputError(f"X has {len(rows)} rows and client {len(column)}; expected as many of each.")
        place = {name: number for number, name in enumerate(self.clients_)}
        ids, owner = number_ids("client", column)
        unknown = [name for name in ids if name not in place]
        if unknown:
            some = first_few(unknown, 3, repr)
            warnings.warn(f"rows of {some} are answered by the global model: fit has not seen them.", stacklevel=3)
        found: Tensor | None = None
        for number, name in enumerate(ids):
            own = torch.from_numpy(np.flatnonzero(owner == number))
            params = self._personal[place[name]].double() if name in place else self._shared
            with torch.no_grad():
                outputs = self._flat(params, rows[own])
            found = outputs.new_empty(len(rows), *outputs.shape[1:]) if found is None else found
            found[own] = outputs
        assert found is not None  # there are rows
        return found

    def _module(self, x: Array, num_outputs: int, default: Callable[[int, int], nn.Module]) -> nn.Module | str:
        """The module to train: the user's, or one that is made, from the estimator's own seed."""
        given = self.random_state
        if given is None or isinstance(given, np.random.RandomState):
            given = int(check_random_state(given).randint(2**31 - 1))
        self._seed = int(given)
        if isinstance(self.model, nn.Module | str):
            return self.model
        if self.model is not None and not callable(self.model):
            raise ConfigError(
                f"model is {self.model!r}; expected a torch module, the name of one of selffl's, or a function of the "
                "numbers of features and outputs that makes one."
            )
        shape: Any = x.shape[1] if x.ndim == 2 else x.shape[1:]
        make: Callable[..., nn.Module] = self.model or default
        return draw_network(lambda: make(shape, num_outputs), self._seed)

    def __getstate__(self) -> dict[str, Any]:
        """Without the run, which holds everybody's rows: whoever is given a model is not given those."""
        found: dict[str, Any] = dict(super().__getstate__())
        found.pop("run_", None)
        return found


class SelfFLClassifier(ClassifierMixin, _Estimator):  # type: ignore[misc]
    """A classifier with a model for each client.

    Each row has a client, ``fit(X, y, client=ids)``; without ``client`` all rows are one client's.  In `predict`,
    `predict_proba` and `score`, rows of a client that was not there in `fit`, and all rows if ``client`` is left out,
    are answered by the global model.  All rows given to `fit` are trained on: split before, as usual.

    A search scores each client by its own model only if it hands ``client`` to `score`, which takes scikit-learn's
    metadata routing: ``set_fit_request(client=True)`` and ``set_score_request(client=True)``.  Without it all rows are
    scored by the global model, and options chosen for that.

    A pickled estimator holds the models but not ``run_``, which has everybody's rows.

    Args:
        model: none for softmax regression; or a torch module with one output for each class, the name of one of
            selffl's, or a function ``(num_features, num_classes)`` that makes a module.
        algorithm: a name, or a method with options: ``selffl.algorithm("ditto", penalty=0.1)``.
        rounds: how many.
        participation: share of clients in a round.
        learning_rate: of the local steps; none for 0.1.
        batch_size: rows of a local step.
        standardise: whether each feature is brought to mean 0 and standard deviation 1 over all clients' rows.  Between
            sites this takes two sums of each client, of its rows and then of their squared distance to the common mean.
            Steps of one size for all features suit few data as they come.
        device: ``cpu``, ``cuda``, or another device of torch's.
        random_state: of first weights, cohorts and minibatches.

    Attributes:
        classes_: The labels, as they were given.
        clients_: The clients' ids.
        mean_: Of each feature, 0 unless standardised.
        scale_: Of each feature, 1 unless standardised.
        run_: The run; its models take rows as ``X`` has them, and number the classes.
        n_features_in_: How many features.
        feature_names_in_: Their names, if ``X`` had any.

    Examples:
        >>> import numpy as np, selffl
        >>> x = np.random.default_rng(0).normal(size=(200, 2))
        >>> client = np.repeat(["anna", "ben"], 100)
        >>> y = np.where((x[:, 0] > 0) == (client == "anna"), "yes", "no")  # what is yes to anna is no to ben
        >>> model = selffl.SelfFLClassifier().fit(x, y, client=client)
        >>> model.predict([[2.0, 0.0], [2.0, 0.0]], client=["anna", "ben"]).tolist()
        ['yes', 'no']
    """

    def fit(self, X: npt.ArrayLike, y: npt.ArrayLike, client: npt.ArrayLike | None = None) -> Self:  # noqa: N803 (scikit-learn's name)
        """Train on rows with a label and a client each; without ``client``, as one client's."""
        x, labels = self._check_rows(X, y)
        check_classification_targets(labels)
        self.classes_, number = np.unique(column_or_1d(labels, warn=True), return_inverse=True)
        if len(self.classes_) < 2:
            raise _InputError(f"y holds {len(self.classes_)} class; expected 2 or more classes to tell apart.")
        module = self._module(x, len(self.classes_), _linear)
        self._train(x, torch.from_numpy(number), client, module, nn.functional.cross_entropy)
        with torch.no_grad():
            num_outputs = self._flat(self._flat.params, torch.zeros(1, *x.shape[1:], dtype=torch.float64)).shape[1:]
        if num_outputs != (len(self.classes_),):
            raise ConfigError(
                f"the model gives outputs of shape {tuple(num_outputs)} for a row; expected ({len(self.classes_)},), "
                "one for each class."
            )
        return self

    def predict_proba(self, X: npt.ArrayLike, client: npt.ArrayLike | None = None) -> Array:  # noqa: N803
        """Probabilities of the classes, in the order of ``classes_``."""
        found: Array = self._outputs(X, client).softmax(-1).numpy()
        return found

    def predict(self, X: npt.ArrayLike, client: npt.ArrayLike | None = None) -> Array:  # noqa: N803
        """The likeliest class of each row."""
        likeliest = self._outputs(X, client).argmax(-1).numpy()
        found: Array = self.classes_[likeliest]
        return found

    def score(
        self,
        X: npt.ArrayLike,  # noqa: N803
        y: npt.ArrayLike,
        client: npt.ArrayLike | None = None,
        sample_weight: npt.ArrayLike | None = None,
    ) -> float:
        """Share of rows that are answered right."""
        return float(accuracy_score(y, self.predict(X, client), sample_weight=sample_weight))


class SelfFLRegressor(RegressorMixin, _Estimator):  # type: ignore[misc]
    """A regression with a model for each client; everything else as in `SelfFLClassifier`.

    Args:
        model: none for linear regression; or a torch module with one output, or a function ``(num_features, 1)`` that
            makes one.
        algorithm: as there.
        rounds: as there.
        participation: as there.
        learning_rate: of the local steps; none for 0.1, and with the default model for as much less as the rows of
            any client ask for (``run_.config.learning_rate``).  Between sites that takes one number of each client.
        batch_size: as there.
        standardise: as there; targets are brought to mean 0 and standard deviation 1 as well, and back in `predict`.
        device: as there.
        random_state: as there.

    Examples:
        >>> import numpy as np, selffl
        >>> x = np.random.default_rng(0).normal(size=(200, 1))
        >>> client = np.repeat(["anna", "ben"], 100)
        >>> y = 100 + np.where(client == "anna", 3.0, -3.0) * x[:, 0]
        >>> model = selffl.SelfFLRegressor(rounds=10).fit(x, y, client=client)
        >>> model.predict([[1.0], [1.0]], client=["anna", "ben"]).round(1).tolist()
        [103.0, 97.0]
    """

    def fit(self, X: npt.ArrayLike, y: npt.ArrayLike, client: npt.ArrayLike | None = None) -> Self:  # noqa: N803
        """Train on rows with a target and a client each; without ``client``, as one client's."""
        x, target = self._check_rows(X, y, y_numeric=True)
        target = column_or_1d(target, warn=True).astype(np.float64)
        module = self._module(x, 1, _linear)
        self._train(x, torch.from_numpy(target.copy()), client, module, squared_error)
        known = self.run_.preparation
        self.target_mean_, self.target_scale_ = (0.0, 1.0) if known is None else (known.label.mean, known.label.scale)
        return self

    def _rate(self, federation: Federation) -> float:
        """Half of the largest steps with which linear regression settles, whichever client takes them.

        With z a row and a 1, a client's squared error has the curvature H, the mean of 2 zz' over its rows.  That of B
        rows drawn afresh has on average a square of at most H^2 and 2 max |z|^2/B times H.
        """
        if self.model is not None:
            return DEFAULT_LEARNING_RATE
        check_settings({"batch_size": self.batch_size})
        momentum = named_method(self.algorithm)[1].momentum
        sizes = federation.train.num_examples.tolist()
        bounds = []
        for rows in torch.split(federation.train.array, sizes):
            z = torch.cat([rows.double(), torch.ones(len(rows), 1, dtype=torch.float64)], dim=1)
            gram = z.T @ z if z.shape[0] > z.shape[1] else z @ z.T
            largest = 2.0 * torch.linalg.eigvalsh(gram)[-1] / len(z)
            varies = 2.0 * z.square().sum(1).max() / self.batch_size
            bounds.append(0.5 * float(largest_step(largest, varies, momentum)))
        least = min(bounds)
        if least < SMALL_LEARNING_RATE:
            name = federation.clients[bounds.index(least)]
            warnings.warn(
                f"steps of {least:.1e} are all that the rows of {name!r} bear, and the rounds may not be enough; "
                "bring features to one scale, leave that client out, or set learning_rate.",
                stacklevel=4,
            )
        return min(DEFAULT_LEARNING_RATE, least)

    def predict(self, X: npt.ArrayLike, client: npt.ArrayLike | None = None) -> Array:  # noqa: N803
        """The expected target of each row."""
        outputs = self._outputs(X, client).reshape(-1).numpy()
        found: Array = outputs * self.target_scale_ + self.target_mean_
        return found

    def score(
        self,
        X: npt.ArrayLike,  # noqa: N803
        y: npt.ArrayLike,
        client: npt.ArrayLike | None = None,
        sample_weight: npt.ArrayLike | None = None,
    ) -> float:
        """R², the share of the targets' variance that is explained."""
        return float(r2_score(y, self.predict(X, client), sample_weight=sample_weight))


def _linear(num_features: int, num_outputs: int) -> nn.Module:
    """One layer that starts at 0, without opinion."""
    layer = nn.Linear(num_features, num_outputs)
    for part in layer.parameters():
        nn.init.zeros_(part)
    return layer
