"""Models of rows that have groups, each fitted to the same training rows and asked about the same test rows.

The estimators of selffl, mixed models by statsmodels and by R's lme4, one regression for all groups, one for each
group, and group means.  Features come standardised; an outcome that is a number comes standardised as well.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from selffl.data.multilevel import GroupedRows
from selffl.errors import ConfigError, DataError

OURS = "selffl estimator"
INTERCEPTS = "mixed model, intercepts (statsmodels)"
SLOPES = "mixed model, slopes (statsmodels)"
R_INTERCEPTS = "mixed model, intercepts (lme4)"
R_SLOPES = "mixed model, slopes (lme4)"
POOLED = "pooled regression"
PER_GROUP = "regression per group"
MEANS = "group means"
MIXED = (INTERCEPTS, SLOPES, R_INTERCEPTS, R_SLOPES)

R_TIMEOUT_S = 600
LME4 = Path(__file__).with_name("lme4.R")
SEPARATED = 1e-6  # a margin above this, with coefficients of at most 1, separates the classes

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Fit:
    """What a fitted model says of the test rows.

    Attributes:
        prediction: The expected outcome of each test row; of a binary outcome the probability of 1.
        cpu_seconds: Of the processor, for fitting and predicting; of R without its start.
        variances: Between groups, as the model has learned them: of the intercept, then of the slopes that vary; of
            selffl's estimators the one over all coefficients.  In the outcome's unit; of a binary one, of log-odds.
        note: What was not as asked for; empty where all was.
    """

    prediction: Array
    cpu_seconds: float
    variances: tuple[float, ...] = ()
    note: str = ""


def is_binary(rows: GroupedRows) -> bool:
    """Whether the outcome is one of two classes."""
    return bool(np.issubdtype(rows.outcome.dtype, np.integer))


def _design(features: Array) -> Array:
    """Features behind a column of ones."""
    return np.column_stack([np.ones(len(features)), features])


def _probability(log_odds: Array) -> Array:
    from scipy.special import expit

    found: Array = expit(log_odds)
    return found


# ------------------------------------------------------------------------------------------------- selffl's estimators


def fit_estimator(train: GroupedRows, test: GroupedRows, rounds: int | None = None) -> Fit:
    """Fit `SelfFLRegressor`, or `SelfFLClassifier` to a binary outcome, with its defaults but for the rounds asked for.

    Rows of groups that were not there in training are answered by the global model.
    """
    from selffl.estimator import SelfFLClassifier, SelfFLRegressor

    began = time.process_time()
    estimator: Any = SelfFLClassifier() if is_binary(train) else SelfFLRegressor()
    if rounds is not None:
        estimator.set_params(rounds=rounds)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        estimator.fit(train.features, train.outcome, client=train.group)

    def answers(rows: GroupedRows, client: Array | None) -> Array:
        if is_binary(train):
            found: Array = estimator.predict_proba(rows.features, client=client)[:, 1]
        else:
            found = estimator.predict(rows.features, client=client)
        return found

    is_known = np.isin(test.group, train.group)
    prediction = np.empty(len(test.group))
    for chosen, has_model in ((is_known, True), (~is_known, False)):
        if chosen.any():
            rows = test.at(chosen)
            prediction[chosen] = answers(rows, rows.group if has_model else None)
    spent, variance = time.process_time() - began, estimator.run_.summary["inter_variance"]
    # A score for each of two classes has a coefficient of its own: log-odds, their difference, vary twice as much.
    # With a squared error σ₀² is in units of twice the variance of residuals.
    unit = 1.0 if is_binary(train) or variance is None else residual_variance(estimator, train)
    variances = () if variance is None else (2.0 * unit * float(variance),)
    note = " ".join(str(said[0].message).split()) if said else ""
    return Fit(prediction, spent, variances, note)


def residual_variance(estimator: Any, train: GroupedRows) -> float:
    """Estimate the variance of residuals by those of the rows that a regression was fitted to.

    Their squares are too small: of a group's coefficients its N rows have decided the share N/(N + n_0), and as many
    degrees of freedom are lost.  The gain that the run predicts is one over that share.
    """
    residual = train.outcome - estimator.predict(train.features, client=train.group)
    gains = [row["predicted_gain"] for row in estimator.run_.clients]
    num_decided = (train.features.shape[1] + 1) * sum(1.0 / gain for gain in gains if gain is not None)
    return float(np.square(residual).sum() / (len(residual) - num_decided))


# ------------------------------------------------------------------------------------------- mixed models, statsmodels


def _statsmodels() -> Any:
    try:
        import statsmodels.api as statsmodels
    except ImportError:
        raise ConfigError(
            "statsmodels is not installed; expected it for the mixed models of this study. "
            "Install selffl with its extra [multilevel]."
        ) from None
    return statsmodels


def fit_mixed_model(train: GroupedRows, test: GroupedRows, slopes: Sequence[int] = ()) -> Fit:
    """Fit a mixed model by statsmodels: an intercept for each group, and a slope for each of the named features.

    Numbers by restricted maximum likelihood; a binary outcome by variational Bayes.
    """
    return (_fit_mixed_logistic if is_binary(train) else _fit_mixed_linear)(train, test, slopes)


def _fit_mixed_linear(train: GroupedRows, test: GroupedRows, slopes: Sequence[int]) -> Fit:
    """Fit by REML with a full covariance matrix; without slopes where that does not converge, and at last pooled.

    Of the optimisers of statsmodels these two find the optimum of lme4 where its default stops before it.
    """
    statsmodels = _statsmodels()
    began = time.process_time()
    varying = [0, *(1 + number for number in slopes)]
    design = _design(train.features)
    found = None
    for method in ("lbfgs", "powell"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a variance at its border; the numbers are checked below
            try:
                model = statsmodels.MixedLM(train.outcome, design, train.group, exog_re=design[:, varying])
                found = model.fit(reml=True, method=method)
            except (np.linalg.LinAlgError, ValueError):
                continue
        if found.converged and np.isfinite([found.llf, *found.fe_params]).all():
            break
        found = None
    if found is None:
        without = _fit_mixed_linear(train, test, ()) if slopes else fit_pooled(train, test)
        note = "did not converge: " + ("fitted without slopes" if slopes else "the pooled regression")
        return replace(without, cpu_seconds=time.process_time() - began, note=note)
    covariance = np.asarray(found.cov_re) / found.scale  # of the random effects, in units of the residual variance
    residual = train.outcome - design @ found.fe_params
    prediction = _design(test.features) @ found.fe_params
    for group in np.unique(test.group):
        own, asked = train.group == group, test.group == group
        if own.any():
            effects = predict_random_effects(design[own][:, varying], residual[own], covariance)
            prediction[asked] += _design(test.features[asked])[:, varying] @ effects
    variances = tuple(np.diag(covariance) * found.scale)
    return Fit(prediction, time.process_time() - began, tuple(map(float, variances)))


def predict_random_effects(design: Array, residual: Array, covariance: Array) -> Array:
    """Compute the best linear unbiased prediction of one group's random effects, D Z' (Z D Z' + I)^-1 r.

    Also where the covariance D, in units of the residual variance, is singular.
    """
    total = design @ covariance @ design.T + np.eye(len(design))
    effects: Array = covariance @ design.T @ np.linalg.solve(total, residual)
    return effects


def _fit_mixed_logistic(train: GroupedRows, test: GroupedRows, slopes: Sequence[int]) -> Fit:
    """Fit by variational Bayes; intercepts and slopes are independent."""
    _statsmodels()
    from statsmodels.genmod.bayes_mixed_glm import BinomialBayesMixedGLM

    began = time.process_time()
    groups, owner = np.unique(train.group, return_inverse=True)
    design = _design(train.features)
    varying = [0, *(1 + number for number in slopes)]
    indicator = (owner[:, None] == np.arange(len(groups))).astype(np.float64)
    random_design = np.column_stack([indicator * design[:, [column]] for column in varying])
    kind = np.repeat(np.arange(len(varying)), len(groups))
    model = BinomialBayesMixedGLM(train.outcome, design, random_design, kind)
    num_parameters = design.shape[1] + len(varying) + random_design.shape[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # The first standard deviations are given: statsmodels would draw them.
        found = model.fit_vb(mean=np.zeros(num_parameters), sd=np.full(num_parameters, np.exp(-0.5)))
    effects = np.asarray(found.vc_mean).reshape(len(varying), len(groups))
    asked = _design(test.features)
    log_odds = asked @ found.fe_mean
    place = {group: number for number, group in enumerate(groups)}
    for group in np.unique(test.group):
        if group in place:
            chosen = test.group == group
            log_odds[chosen] += asked[chosen][:, varying] @ effects[:, place[group]]
    variances = tuple(float(np.exp(2 * value)) for value in found.vcp_mean)
    return Fit(_probability(log_odds), time.process_time() - began, variances)


# --------------------------------------------------------------------------------------------------- mixed models, lme4


@cache
def why_no_lme4() -> str:
    """Say why lme4 cannot be used; empty where it can."""
    rscript = shutil.which("Rscript")
    if rscript is None:
        return "R was not found"
    ended = subprocess.run([rscript, "-e", "library(lme4)"], capture_output=True, check=False, timeout=R_TIMEOUT_S)
    return "R has no package lme4" if ended.returncode else ""


def fit_lme4(train: GroupedRows, test: GroupedRows, slopes: Sequence[int]) -> dict[str, Fit]:
    """Fit both mixed models by R's lme4: `lmer` by REML, or `glmer` by Laplace's approximation."""
    names = [f"x{number}" for number in range(train.features.shape[1])]
    terms = {R_INTERCEPTS: "1"} | (
        {R_SLOPES: " + ".join(["1", *(names[number] for number in slopes)])} if slopes else {}
    )
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name, rows in (("train", train), ("test", test)):
            with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(["group", "outcome", *names])
                writer.writerows(
                    zip(rows.group, rows.outcome.tolist(), *rows.features.T.tolist(), strict=True)
                )  # numbers as Python writes them: none of their digits is lost
        kind = "binary" if is_binary(train) else "number"
        command = [str(shutil.which("Rscript")), str(LME4), place, kind, *terms.values()]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=R_TIMEOUT_S, check=False)
        if ended.returncode:
            raise DataError(f"lme4 gave no fit ({' '.join(ended.stderr.split())[-200:]}); expected one.")
        with (folder / "facts.csv").open(encoding="utf-8", newline="") as file:
            facts = list(csv.DictReader(file))
        with (folder / "predictions.csv").open(encoding="utf-8", newline="") as file:
            predictions = np.loadtxt(file, delimiter=",", skiprows=1, ndmin=2)
    return {
        label: Fit(
            predictions[:, number],
            float(fact["seconds"]),
            tuple(map(float, fact["variances"].split())),
            " ".join(fact["note"].split()),
        )
        for number, (label, fact) in enumerate(zip(terms, facts, strict=True))
    }


# ------------------------------------------------------------------------------------------------- plain regressions


def _coefficients(design: Array, outcome: Array) -> Array:
    """Estimate by least squares, or for a binary outcome by maximum likelihood; nothing is penalised."""
    if not np.issubdtype(outcome.dtype, np.integer):
        found: Array = np.linalg.lstsq(design, outcome)[0]
        return found
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=np.inf, fit_intercept=False, max_iter=10_000, tol=1e-8).fit(design, outcome)
    return np.asarray(model.coef_[0])


def _answers(design: Array, coefficients: Array, binary: bool) -> Array:
    values: Array = design @ coefficients
    return _probability(values) if binary else values


def fit_pooled(train: GroupedRows, test: GroupedRows) -> Fit:
    """Fit one regression to the rows of all groups."""
    began = time.process_time()
    coefficients = _coefficients(_design(train.features), train.outcome)
    prediction = _answers(_design(test.features), coefficients, is_binary(train))
    return Fit(prediction, time.process_time() - began)


def fit_per_group(train: GroupedRows, test: GroupedRows) -> Fit:
    """Fit a regression to each group's own rows where that can be done; elsewhere the pooled one answers.

    Features that do not vary within a group are left out of its regression.  It can be fitted where rows are more than
    coefficients and decide them all; with a binary outcome, also only where no plane separates the classes.
    """
    began = time.process_time()
    prediction = fit_pooled(train, test).prediction.copy()
    groups = np.unique(test.group)
    num_fitted = 0
    for group in groups:
        own, asked = train.at(train.group == group), test.group == group
        if not len(own.outcome):
            continue
        varies = np.ptp(own.features, axis=0) > 0
        design = _design(own.features[:, varies])
        if len(design) <= design.shape[1] or np.linalg.matrix_rank(design) < design.shape[1]:
            continue
        if is_binary(train) and is_separable(design, own.outcome):
            continue
        coefficients = _coefficients(design, own.outcome)
        prediction[asked] = _answers(_design(test.features[asked][:, varies]), coefficients, is_binary(train))
        num_fitted += 1
    note = "" if num_fitted == len(groups) else f"{num_fitted} of {len(groups)} groups have one"
    return Fit(prediction, time.process_time() - began, note=note)


def is_separable(design: Array, classes: Array) -> bool:
    """Say whether a plane has no row on the wrong side, so that logistic regression has no finite estimate.

    A linear programme looks for coefficients within [-1, 1] with the largest sum of margins, none below 0 (Albert and
    Anderson, Biometrika 1984; Konis 2007).
    """
    from scipy.optimize import linprog

    signed = design * np.where(classes == 1, 1.0, -1.0)[:, None]
    found = linprog(-signed.sum(0), A_ub=-signed, b_ub=np.zeros(len(signed)), bounds=(-1, 1), method="highs")
    return bool((signed @ found.x).sum() > SEPARATED)


def fit_means(train: GroupedRows, test: GroupedRows) -> Fit:
    """Take the mean of each group's training rows, and of all for a new group.

    Of a binary outcome the group's share, with one row more that has everybody's: no share is 0 or 1.
    """
    began = time.process_time()
    everybody = float(train.outcome.mean())
    prediction = np.full(len(test.group), everybody)
    more = 1 if is_binary(train) else 0
    for group in np.unique(test.group):
        own = train.outcome[train.group == group]
        if len(own):
            prediction[test.group == group] = (own.sum() + more * everybody) / (len(own) + more)
    return Fit(prediction, time.process_time() - began)
