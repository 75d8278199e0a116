"""What the numbers of a group say, in sentences; every number comes from the tables of `data`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from selffl.algorithms import ALGORITHMS, algorithm
from selffl.algorithms.optimisers import Optimiser
from selffl.errors import pluralise
from selffl.reports import client_gains, scores
from selffl.reports.collect import Group
from selffl.reports.over_rounds import has_reports
from selffl.reports.schema import Inside, SeedTable, Tables
from selffl.runs.evaluation import majority_sentence
from selffl.runs.recipe import REMOTE, Recipe, check_settings
from selffl.studies.result import Estimate
from selffl.training.losses import OWN_LOSSES
from selffl.training.metrics import PERCENT, name_of, plain_number


def list_words(names: Sequence[str]) -> str:
    """Words as a list: with commas, and an and before the last."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def shown(value: float | None, metric: str) -> str:
    """A score as a reader sees it: tenths of a percent, else four digits."""
    if value is None or math.isnan(value):
        return "–"
    return f"{value:.1f} %" if metric in PERCENT else plain_number(value)


def with_error(estimate: Estimate | None, metric: str, *, signed: bool = False) -> str:
    """Mean ± standard error for the table, whose heading has the unit."""
    if estimate is None or math.isnan(estimate.mean):
        return "–"
    form = ".1f" if metric in PERCENT else {"correlation": ".2f", "pooled_auc": ".3f"}.get(metric)
    if form is None:
        mean = plain_number(estimate.mean + 0.0, signed=signed)
        return mean if math.isnan(estimate.error) else f"{mean} ± {plain_number(estimate.error, 2)}"
    # A minus sign as wide as a plus; nothing rounds to minus nothing.
    mean = format(estimate.mean + 0.0, ("+" if signed else "") + form).replace("-", "−")
    return mean if math.isnan(estimate.error) else f"{mean} ± {estimate.error:{form}}"


def p_shown(p: float | None) -> str:
    """A p-value."""
    return "–" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def headline(group: Group) -> str:
    """The verdict in one sentence."""
    rows, metric = scores.lines(group), group.metric
    first = rows[0]
    score = first.scores.get("weighted")
    if score is None:
        what = "diverged (NaN or infinity)" if first.num_diverged else "has not been evaluated yet"
        return f"{first.method} {what}."
    name, value = name_of(metric), shown(score.mean, metric)
    how = f"{value} {name}" if metric in PERCENT else f"{name} {value}"
    if "pooled_auc" in first.beside:
        how += f" and AUC {first.beside['pooled_auc'].mean:.2f}"
    reached = f"{first.method} reaches {how} on {group.data}"
    if len(rows) == 1:
        return f"{reached} with a model for every client{_beside(first, metric)}."
    by: dict[str, list[str]] = {}
    for row in rows[1:]:
        # The row says how the other method does against the first; the sentence is about the first.
        by.setdefault(row.verdict, []).append(row.method)
    parts = [
        text.format(list_words(by[key]))
        for key, text in (
            ("worse", "better than {} (statistically significant)"),
            ("better", "worse than {} (statistically significant)"),
            ("inconclusive", "inconclusive against {}"),
            ("below", "above {}"),
            ("above", "below {}"),
            ("equal", "level with {}"),
        )
        if key in by
    ]
    lost = [row.method for row in rows[1:] if row.num_diverged and "weighted" not in row.scores]
    end = f"; {list_words(lost)} diverged (NaN or infinity)." if lost else "."
    if not parts:
        return reached + end
    ground = "" if any(row.p_value is not None for row in rows) else " (one seed: nothing is tested)"
    *most, last = parts
    return f"{reached}: {'; '.join([*most, f'and {last}' if most else last])}{ground}{end}"


def verdict(group: Group) -> str:
    """Whether joining pays, for somebody who has not heard of the methods; nothing where none trains alone."""
    rows, metric, base = scores.lines(group), group.metric, scores.alone(group)
    first = rows[0]
    if base in (None, 0) or "weighted" not in first.scores or "weighted" not in rows[base or 0].scores:
        return ""
    alone = rows[base or 0]
    gap = (first.scores["weighted"].mean - alone.scores["weighted"].mean) * (1 if group.is_higher_better else -1)
    said = {"worse": "Joining pays", "better": "Joining does not pay", "inconclusive": "Whether joining pays is open"}
    if alone.verdict in said:
        start = said[alone.verdict]
    else:  # nothing is tested
        start = "Joining looks better" if gap > 0 else "Joining looks worse" if gap < 0 else "Joining changes nothing"
        start += " (one seed, not tested)"
    name = "" if metric in PERCENT else f"{name_of(metric)} of "
    text = f"{start}: with {first.method}, clients reach {name}{shown(first.scores['weighted'].mean, metric)} "
    text += f"{name_of(metric) + ' ' if metric in PERCENT else ''}on their own {group.config.evaluate_on} rows, "
    text += f"against {shown(alone.scores['weighted'].mean, metric)} alone"
    one = scores.find_shared_method(group)
    if one not in (None, 0) and "weighted" in rows[one or 0].scores:
        text += f" and {shown(rows[one or 0].scores['weighted'].mean, metric)} with one shared model"
    return text.replace(" %", "\N{NO-BREAK SPACE}%") + "."


def majority(group: Group) -> str:
    """What always answering the largest class scores, where that is nearly everything; else nothing."""
    return majority_sentence([run.records.summary for run in group.runs])


def name_test(group: Group) -> str:
    """The test behind the verdict, in small print; nothing where nothing is tested."""
    tested = [row for row in scores.lines(group) if row.p_value is not None]
    if not tested:
        return ""
    pairs = sorted({row.difference.count for row in tested if row.difference is not None})
    seeds = f"{pairs[0]} to {pairs[-1]} seeds" if len(pairs) > 1 else pluralise(pairs[0], "seed")
    text = (
        f"Paired over {seeds}; corrected resampled t test (Nadeau and Bengio 2003), "
        + (f"Holm over {len(tested)} comparisons, " if len(tested) > 1 else "")
        + "5 % level"
    )
    if group.recorded_ratio is None:
        text += "; the runs have not recorded their rows: a tenth of them taken to be test rows"
    if scores.has_one_split(group):
        text += "; all seeds share one split of the rows, so other test rows may say otherwise"
    return text + "."


def _beside(line: scores.Line, metric: str) -> str:
    said = [
        f"{shown(line.scores[part].mean, metric)} {text}"
        for part, text in (("global", "with the one they share"), ("worst10", "for the worst tenth of clients"))
        if part in line.scores
    ]
    return "".join(f", {part}" for part in said)


def takeaways(group: Group, tables: Tables) -> dict[str, str]:
    """A sentence over each picture."""
    takeaway = {"rounds": _of_rounds(group), "tails": _of_tails(group)}
    if tables["seeds"]:
        table = tables["seeds"][0]
        takeaway["clients"] = _of_clients(group, table)
        takeaway["gains"] = _of_gains(group, table)
        takeaway["predicted"] = _of_predicted(group, table)
        takeaway["partition"] = _of_partition(table)
        takeaway["clusters"] = _of_clusters(table)
    if tables["inside"]:
        takeaway["inside"] = " ".join(filter(None, (_of_inside(group, tables["inside"][0]), _tell_cut(group, tables))))
    return takeaway


def _of_rounds(group: Group) -> str:
    curves = zip(group.methods, scores.by_round(group, "weighted"), strict=True)
    name, curve = next(((method.label, curve) for method, curve in curves if curve is not None), ("", None))
    if curve is None:
        return "No round has been evaluated yet."
    pick = max if group.is_higher_better else min
    top, at = pick(zip(curve["y"], curve["x"], strict=True), key=lambda point: point[0])
    last, end = curve["y"][-1], curve["x"][-1]
    text = f"{name} is at {shown(last, group.metric)} in round {end:,}"
    if at != end and top != last:
        text += f"; its best was {shown(top, group.metric)} in round {at:,}"
    return text + "."


def _of_tails(group: Group) -> str:
    rows = [row for row in scores.lines(group) if "worst10" in row.scores]
    if not rows:
        return "No round has been evaluated yet."
    pick = max if group.is_higher_better else min
    best = pick(rows, key=lambda row: row.scores["worst10"].mean)
    score, first = shown(best.scores["worst10"].mean, group.metric), rows[0]
    if len(rows) == 1:
        return f"The worst tenth of clients is at {score}."
    text = f"The worst tenth of clients fares best with {best.method}: {score}"
    if best is not first:
        text += f", against {shown(first.scores['worst10'].mean, group.metric)} with {first.method}"
    return text + "."


def _of_clients(group: Group, table: SeedTable) -> str:
    sizes = [size for size in table["train"] if size is not None]
    low, high = min(sizes), max(sizes)
    each = pluralise(high, "training row") if low == high else f"from {low:,} to {pluralise(high, 'training row')}"
    text = f"{pluralise(table['total'], 'client')}, {each}{' each' if low == high and table['total'] > 1 else ''}."
    if len(table["clients"]) < table["total"]:
        text += f" {len(table['clients']):,} are shown, evenly chosen by size."
    return text


def _of_gains(group: Group, table: SeedTable) -> str:
    gains, base = client_gains.gains(group, table, 0)
    pairs = [(value, n) for value, n in zip(gains, table["test"], strict=True) if value is not None]
    if not pairs:
        return "There is nothing to hold the personal models against."
    known = [value for value, n in pairs if client_gains.is_counted(n)]
    few = len(pairs) - len(known)
    if not known:  # then they count after all
        known, few = [value for value, _ in pairs], 0
    up, down = sum(value > 0 for value in known), sum(value < 0 for value in known)
    mean, metric = sum(known) / len(known), group.client_metric
    size = f"{abs(mean):.1f} points" if metric in PERCENT else plain_number(abs(mean), 3)
    which = "With" if len(group.seeds) == 1 else f"In seed {group.seeds[0]}, with"  # others have other clients
    return (
        f"{which} {group.methods[0].label}, {up:,} of {pluralise(len(known), 'client')} "
        f"{'is' if len(known) == 1 else 'are'} better off than with {base}, "
        f"{down:,} worse off, {len(known) - up - down:,} the same; the mean gain is "
        f"{'−' if mean < 0 else '+'}{size}."
        + (
            f" {pluralise(few, 'client')} with fewer than {client_gains.FEWEST_TEST_ROWS} test rows "
            f"{'is' if few == 1 else 'are'} grey and not counted."
            if few
            else ""
        )
        + ("" if base == client_gains.ALONE else " Trained with gain=True, a run is compared with training alone.")
    )


def _of_predicted(group: Group, table: SeedTable) -> str:
    for number, columns in enumerate(table["methods"]):
        if columns is None or "predicted" not in columns:
            continue
        if not client_gains.joining(group, group.seeds[0], number):
            continue
        correlation = client_gains.prediction(group, number)
        name = group.methods[number].label
        if correlation is None:
            return f"The gains of {name} do not vary enough to say whether its predictions order them."
        rho, p, count = correlation
        how = "orders" if rho > 0 and p < 0.05 else "does not order"
        sign = "−" if rho < 0 else ""
        which = f" in seed {group.seeds[0]}" if len(group.seeds) > 1 else ""
        return (
            f"What {name} predicts {how} what its clients gain: rank correlation {sign}{abs(rho):.2f} over "
            f"{pluralise(count, 'client')}{which} (p {'' if p < 0.001 else '= '}{p_shown(p)})."
            + ("" if client_gains.predicts(group, number) else " Predicted gains are left out.")
        )
    return ""


def _of_partition(table: SeedTable) -> str:
    classes = table["classes"]
    if classes is None:
        return ""
    held = [0] * len(table["clients"])
    for client in classes["client"]:
        held[client] += 1
    low, high = min(held), max(held)
    each = f"{low}" if low == high else f"{low} to {high}"
    return f"Each client holds {each} of {pluralise(len(classes['names']), 'class')}."


def _of_clusters(table: SeedTable) -> str:
    if table["cluster"] is None:
        return ""
    named = [value for value in table["cluster"] if value is not None]
    return f"{pluralise(len(set(named)), 'cluster')} over {pluralise(len(named), 'client')}."


def _of_inside(group: Group, inside: Inside) -> str:
    name = group.methods[inside["method"]].label
    parts = []
    known = [(i, j) for i, j in zip(inside["inter"], inside["intra"], strict=True) if i is not None and j is not None]
    if known:
        inter, intra = (plain_number(value, 3) for value in known[-1])
        sure = ""
        if inside["interval"] is not None:
            low, high = inside["interval"]
            of_several = " on average over seeds" if len(group.methods[inside["method"]].runs) > 1 else ""
            sure = f" (between {plain_number(low, 3)} and {plain_number(high, 3)} with 95 % confidence{of_several})"
        if inside["closing"] is None:
            parts.append(f"{name} ends with a variance of {inter} between clients{sure} and {intra} within one")
        else:
            parts.append(
                f"By its closing rounds {name} has a variance of {plain_number(inside['closing'], 3)} between clients"
                f"{sure}; the last round of training had {inter}, and {intra} within one"
            )
    if inside["counts"] and inside["most"]:
        over = sum(n for low, n in zip(inside["bins"], inside["counts"], strict=True) if low >= inside["most"])
        is_edge = inside["most"] in inside["bins"]
        total = sum(inside["counts"])
        if is_edge:
            of = f"the {pluralise(total, 'client-round')} it has chosen steps for"
            parts.append(f"{100 * over / total:.0f} % of {of} want ℓ_max = {inside['most']} or more")
    return f"{'; '.join(parts)}." if parts else ""


def _tell_cut(group: Group, tables: Tables) -> str:
    """What of the rounds and of the client-rounds a page does not hold."""
    parts = []
    total = max(one["totalRounds"] for one in tables["inside"])
    if len(tables["inside"][0]["rounds"]) < total:
        parts.append(f"the curves have {max(len(one['rounds']) for one in tables['inside']):,} of {total:,} rounds")
    every = max((path["every"] for path in tables["paths"]), default=1)
    if every > 1:
        parts.append(f"of each client one in {every} of the rounds it took part in is shown")
    held = {(path["seed"], path["method"]) for path in tables["paths"]}
    absent = [
        f"{group.methods[number].label}, seed {table['seed']}"
        for table in tables["seeds"]
        for number, run in enumerate(scores.runs_of_seed(group, table["seed"]))
        if run is not None and has_reports(run) and (table["seed"], number) not in held
    ]
    if absent:
        parts.append(f"rounds of single clients are left out for {list_words(absent)}")
    return f"To keep the page small, {'; '.join(parts)}." if parts else ""


# ----------------------------------------------------------------------------------------------------- to reproduce


# Settings that are always written; others, where they are not the default.
ALWAYS_SHOWN = ("rounds", "participation", "learning_rate", "batch_size", "seed", "device", "evaluate_every")


def call(recipe: Recipe) -> str:
    """The Python that trains the same run again, as far as its parts have names."""
    if recipe.device == REMOTE:
        return f"selffl.flower.server_app(…, {recipe.algorithm!r}, …)  # over Flower, with the sites' own rows"
    source, model = recipe.source, dict(recipe.model or {})
    rows = "federation"
    if source is not None:
        options = _arguments({key: value for key, value in source.items() if key != "name"})
        rows = f"load({', '.join([repr(source['name']), *options])})"
    for known in ("shape", "num_classes", "seed"):
        model.pop(known, None)
    name = model.pop("name", None)
    settings = _settings(recipe)
    if name is not None and model:
        settings["model_options"] = repr(model)
    parts = {"loss": _loss(recipe.loss), "metrics": bool(recipe.own_metrics), "start": recipe.is_warm}
    given = {key: text if isinstance(text, str) else key for key, text in parts.items() if text}
    lines = [repr(name) if name else "model", rows, _method(recipe), _joined_arguments(settings)]
    lines += [_joined_arguments(given)] if given else []
    own = [
        word
        for word in ("model", "federation", "method", "loss", "metrics", "start")
        if word in (*lines, *given.values())
    ]
    text = f"# Of your own, as in this run: {', '.join(own)}.\n" if own else ""
    text += "import torch\n\n" if any(value.startswith("torch.") for value in given.values()) else ""
    text += "import selffl\n" + ("from selffl.data import load\n" if source is not None else "")
    return text + "selffl.train(\n    " + ",\n    ".join(lines) + ",\n)"


def _settings(recipe: Recipe) -> dict[str, str]:
    """Settings as arguments; checkpoints are left out, for the call writes no folder."""
    usual = check_settings({})
    found = {
        name: value
        for name, value in recipe.settings().items()
        if name in ALWAYS_SHOWN or (value != usual[name] and name != "checkpoint_every")
    }
    return {name: _optimiser(value) if isinstance(value, Optimiser) else repr(value) for name, value in found.items()}


def _loss(name: str | None) -> str | None:
    """The loss as an argument; none where it follows from labels and outputs."""
    if name is None:
        return "loss"
    return None if name in (*OWN_LOSSES, "cross_entropy") else f"torch.nn.functional.{name}"


def _optimiser(chosen: Optimiser) -> str:
    kind = type(chosen)
    if chosen == kind():
        return repr(chosen.name)
    return f"selffl.algorithms.{kind.__name__}({', '.join(_arguments(vars(chosen)))})"


def _method(recipe: Recipe) -> str:
    if recipe.has_own_method or recipe.algorithm not in ALGORITHMS:
        return "method"
    usual = algorithm(recipe.algorithm)
    options = {key: value for key, value in recipe.options.items() if getattr(usual, key, None) != value}
    if not options:
        return repr(recipe.algorithm)
    return f"selffl.algorithm({', '.join([repr(recipe.algorithm), *_arguments(options)])})"


def _arguments(values: dict[str, Any]) -> list[str]:
    return [f"{key}={value!r}" for key, value in values.items()]


def _joined_arguments(texts: dict[str, str]) -> str:
    return ", ".join(f"{key}={text}" for key, text in texts.items())
