"""The methods once more, one client at a time, in plain Python: the oracle of test_twins.py.

Written from the publications and the decisions D1–D12 *before* the library's own algorithms were read, and with
nothing but floats and lists. A model is a list of P floats; client m's loss is the
Gaussian one, with gradient (θ_i − z_mi) / σ_m², every minibatch is the full data and B = 1.

Every run takes a *problem*, a dict of plain values:

    start       θ^0, P floats
    cohorts     the clients of each round: cohorts[t] is a list of client numbers
    estimates   z: estimates[t][m] is a list of P floats (the same for every t unless the data is drawn anew)
    variances   σ_m², one float a client
    rates       η_m, one float a client
    examples    N_m, one float a client

and returns a dict with the global model, the personal models of all clients, the global model after every round
and, for each round, the steps and the number of gradients of the cohort's clients, in the cohort's order.
"""

import math

# --------------------------------------------------------------------------------------------------- vectors as lists


def mean_model(models, weights):
    """Σ w_k x_k / Σ w_k, coordinate by coordinate."""
    total = math.fsum(weights)
    return [
        math.fsum(w * model[i] for w, model in zip(weights, models, strict=True)) / total for i in range(len(models[0]))
    ]


def spread(models, scale):
    """Trace of the empirical variance, by two passes: Σ_k |x_k − x̄|², divided by their number if scale is "mean"."""
    centre = mean_model(models, [1.0] * len(models))
    total = math.fsum((x - c) ** 2 for model in models for x, c in zip(model, centre, strict=True))
    return total / len(models) if scale == "mean" else total


def norm(model):
    return math.sqrt(math.fsum(x * x for x in model))


def blend(old, new, share):
    """(1 − share)·old + share·new."""
    return [(1.0 - share) * a + share * b for a, b in zip(old, new, strict=True)]


def gradient_of(problem, t, m):
    """∇f_m at round t: θ ↦ (θ − z_m) / σ_m²."""
    estimate, variance = problem["estimates"][t][m], problem["variances"][m]

    def gradient(model):
        return [(x - z) / variance for x, z in zip(model, estimate, strict=True)]

    return gradient


def descend(model, gradient, rate, steps):
    for _ in range(steps):
        model = [x - rate * g for x, g in zip(model, gradient(model), strict=True)]
    return model


# ------------------------------------------------------------------------------------------------------- the baselines


def outcome(global_model, personal, history, steps, gradients):
    return {"global": global_model, "personal": personal, "history": history, "steps": steps, "gradients": gradients}


def personal_or_global(memory, global_model, num_clients):
    """D10: the client's last personal model; never sampled: the global model."""
    return [memory.get(m, global_model) for m in range(num_clients)]


def example_weights(problem, cohort, weighting):
    return [problem["examples"][m] if weighting == "examples" else 1.0 for m in cohort]


def run_fedavg(problem, *, num_local_steps, weighting="examples"):
    """L steps from w, then the average weighted by N_m or equally. Everybody's personal model is the global one."""
    model, history, steps, gradients = problem["start"], [], [], []
    for t, cohort in enumerate(problem["cohorts"]):
        trained = [descend(model, gradient_of(problem, t, m), problem["rates"][m], num_local_steps) for m in cohort]
        model = mean_model(trained, example_weights(problem, cohort, weighting))
        history.append(model)
        steps.append([num_local_steps] * len(cohort))
        gradients.append([num_local_steps] * len(cohort))
    return outcome(model, [model] * len(problem["variances"]), history, steps, gradients)


def run_fedprox(problem, *, num_local_steps, penalty, weighting="examples"):
    """FedAvg with μ(w_k − w) added to every gradient."""
    model, history, steps, gradients = problem["start"], [], [], []
    for t, cohort in enumerate(problem["cohorts"]):
        trained = []
        for m in cohort:
            gradient, own = gradient_of(problem, t, m), model
            for _ in range(num_local_steps):
                pull = [penalty * (x - w) for x, w in zip(own, model, strict=True)]
                own = [x - problem["rates"][m] * (g + p) for x, g, p in zip(own, gradient(own), pull, strict=True)]
            trained.append(own)
        model = mean_model(trained, example_weights(problem, cohort, weighting))
        history.append(model)
        steps.append([num_local_steps] * len(cohort))
        gradients.append([num_local_steps] * len(cohort))
    return outcome(model, [model] * len(problem["variances"]), history, steps, gradients)


def run_local(problem, *, num_local_steps):
    """Every client by itself, from the model it first received. The global model stays as it was sent."""
    model, memory, history, steps, gradients = problem["start"], {}, [], [], []
    for t, cohort in enumerate(problem["cohorts"]):
        for m in cohort:
            begin = memory.get(m, model)
            memory[m] = descend(begin, gradient_of(problem, t, m), problem["rates"][m], num_local_steps)
        history.append(model)
        steps.append([num_local_steps] * len(cohort))
        gradients.append([num_local_steps] * len(cohort))
    personal = personal_or_global(memory, model, len(problem["variances"]))
    return outcome(model, personal, history, steps, gradients)


def run_ditto(problem, *, num_local_steps, penalty, weighting="examples"):
    """v ← v − η(∇f(v) + λ(v − w^t)) beside w_k ← w_k − η∇f(w_k); v stays on the client and is what is judged."""
    model, memory, history, steps, gradients = problem["start"], {}, [], [], []
    for t, cohort in enumerate(problem["cohorts"]):
        trained = []
        for m in cohort:
            gradient, rate = gradient_of(problem, t, m), problem["rates"][m]
            shared, own = model, memory.get(m, model)
            for _ in range(num_local_steps):
                pull = [penalty * (v - w) for v, w in zip(own, model, strict=True)]
                own = [v - rate * (g + p) for v, g, p in zip(own, gradient(own), pull, strict=True)]
                shared = [w - rate * g for w, g in zip(shared, gradient(shared), strict=True)]
            memory[m] = own
            trained.append(shared)
        model = mean_model(trained, example_weights(problem, cohort, weighting))
        history.append(model)
        steps.append([num_local_steps] * len(cohort))
        gradients.append([2 * num_local_steps] * len(cohort))
    personal = personal_or_global(memory, model, len(problem["variances"]))
    return outcome(model, personal, history, steps, gradients)


def run_pfedme(problem, *, num_local_steps, personal_rates, penalty=15.0, inner_steps=5, mixing=1.0):
    """K inner steps θ ← θ − η_p(∇f(θ) + λ(θ − w_k)), then w_k ← w_k − ηλ(w_k − θ); w ← (1−β)w + β·mean. Judge θ.

    θ begins each round at the received model and goes on from one of the R steps to the next.
    """
    model, memory, history, steps, gradients = problem["start"], {}, [], [], []
    for t, cohort in enumerate(problem["cohorts"]):
        uploads = []
        for m in cohort:
            gradient, rate, personal_rate = gradient_of(problem, t, m), problem["rates"][m], personal_rates[m]
            theta, local = model, model
            for _ in range(num_local_steps):
                for _ in range(inner_steps):
                    pull = [penalty * (x - w) for x, w in zip(theta, local, strict=True)]
                    theta = [x - personal_rate * (g + p) for x, g, p in zip(theta, gradient(theta), pull, strict=True)]
                local = [w - rate * penalty * (w - x) for w, x in zip(local, theta, strict=True)]
            memory[m] = theta
            uploads.append(local)
        model = blend(model, mean_model(uploads, [1.0] * len(cohort)), mixing)
        history.append(model)
        steps.append([num_local_steps] * len(cohort))
        gradients.append([num_local_steps * inner_steps] * len(cohort))
    personal = personal_or_global(memory, model, len(problem["variances"]))
    return outcome(model, personal, history, steps, gradients)


def run_perfedavg(problem, *, num_local_steps, inner_rates, hessian_free=False, difference=1e-3, adaptation_steps=1):
    """w' = w − α∇f(w), then w ← w − β∇f(w'); Hessian-free: w ← w − β(g' − αH(w)g'), Hg' by central difference.

    β is the client's learning rate. The personal model is the global one after one step of size α, on the data as it
    stands when the run is over: problem["estimates"] has one entry more than there are rounds.
    """
    model, history, steps, gradients = problem["start"], [], [], []
    for t, cohort in enumerate(problem["cohorts"]):
        uploads = []
        for m in cohort:
            gradient, inner_rate, outer_rate = gradient_of(problem, t, m), inner_rates[m], problem["rates"][m]
            local = model
            for _ in range(num_local_steps):
                adapted = [w - inner_rate * g for w, g in zip(local, gradient(local), strict=True)]
                meta = gradient(adapted)
                if hessian_free:
                    ahead = gradient([w + difference * g for w, g in zip(local, meta, strict=True)])
                    behind = gradient([w - difference * g for w, g in zip(local, meta, strict=True)])
                    curvature = [(a - b) / (2.0 * difference) for a, b in zip(ahead, behind, strict=True)]
                    meta = [g - inner_rate * c for g, c in zip(meta, curvature, strict=True)]
                local = [w - outer_rate * g for w, g in zip(local, meta, strict=True)]
            uploads.append(local)
        model = mean_model(uploads, [1.0] * len(cohort))
        history.append(model)
        steps.append([num_local_steps] * len(cohort))
        gradients.append([num_local_steps * (4 if hessian_free else 2)] * len(cohort))
    now, clients = len(problem["cohorts"]), range(len(problem["variances"]))
    personal = [descend(model, gradient_of(problem, now, m), inner_rates[m], adaptation_steps) for m in clients]
    return outcome(model, personal, history, steps, gradients)


# ------------------------------------------------------------------------------------------------------------- Self-FL


def others_precision(m, counted, reported, inter_variance):
    """S_m = Σ_{k≠m} 1/(σ_0² + σ_k²) from the reports the server holds; D3: the unknown count as the mean known."""
    known = [value for value in reported if value is not None]
    usual = math.fsum(known) / len(known)
    filled = [usual if reported[k] is None else reported[k] for k in counted if k != m]
    return math.fsum(1.0 / (inter_variance + value) for value in filled)


def steps_of(intra_variance, inter_variance, others, rate, form, max_local_steps):
    """ℓ_m of (1 − η/σ_m²)^ℓ = S/(1/σ_m² + S) (B = 1), as D7 rounds it; the exact form has P = 1/(σ_0² + 1/S) for S."""
    if intra_variance <= 0.0 or rate / intra_variance >= 1.0:
        return 1
    if form == "exact" and others > 0.0:
        others = 1.0 / (inter_variance + 1.0 / others)
    if others == 0.0:
        return max_local_steps
    right = others / (1.0 / intra_variance + others)
    return max(1, min(max_local_steps, round(math.log(right) / math.log(1.0 - rate / intra_variance))))


def initial_model(model, own, own_weight, others):
    """θ − w_m/S_m (θ_m − θ); without others there is nothing to take off and training starts at θ."""
    if others == 0.0:
        return model
    return [x - own_weight / others * (y - x) for x, y in zip(model, own, strict=True)]


def merge(problem, cohort, model, uploads, reported, inter_variance, *, known_inter, variance_scale, smoothing):
    """The server's half: σ_0² first (D8: a cohort of one leaves it), then the weights, then the smoothing average."""
    if known_inter is None and len(cohort) > 1:
        inter_variance = spread(uploads, variance_scale)
    known = [value for value in reported if value is not None]
    if known:
        usual = math.fsum(known) / len(known)
        filled = [usual if reported[m] is None else reported[m] for m in cohort]
        weights = [1.0 / (inter_variance + value) for value in filled]
    else:
        weights = [1.0] * len(cohort)
    return blend(model, mean_model(uploads, weights), smoothing), inter_variance


def converge(model, gradient, rate, tolerance, max_convergence_steps):
    """Steps until |Δθ| ≤ tolerance·(1 + |θ|), looked at at every tenth step and at the last allowed one."""
    taken = 0
    while taken < max_convergence_steps:
        before, model = model, descend(model, gradient, rate, 1)
        taken += 1
        is_looked_at = taken % 10 == 0 or taken == max_convergence_steps
        moved = norm([a - b for a, b in zip(model, before, strict=True)])
        if is_looked_at and moved <= tolerance * (1.0 + norm(before)):
            break
    return model, taken


def run_self_fl(
    problem,
    *,
    smoothing,
    max_local_steps,
    initial_steps,
    form="paper",
    known_inter=None,
    variance_scale="sum",
    others="cohort",
    augmented=False,
    tolerance=0.0,
    max_convergence_steps=0,
):
    """Algorithm 1, or Algorithm 2 if augmented.

    With known_inter (σ_0²) every σ_m² is known too, to the client and to the server, from the start. The run also
    returns what the server holds: the last reported variance of each client (None: never known), and σ_0².
    """
    is_known = known_inter is not None
    num_clients = len(problem["variances"])
    model, inter_variance = problem["start"], known_inter if is_known else 0.0
    reported = list(problem["variances"]) if is_known else [None] * num_clients
    personal, recorded = {}, {m: [] for m in range(num_clients)}  # recorded: θ_m^t, or θ_{m,t} if augmented
    history, steps, gradients = [], [], []
    for t, cohort in enumerate(problem["cohorts"]):
        counted = cohort if others == "cohort" else range(num_clients)
        does_server_know = any(value is not None for value in reported)
        uploads, reports, round_steps, round_gradients = [], [], [], []
        for m in cohort:
            gradient, rate = gradient_of(problem, t, m), problem["rates"][m]
            if is_known:
                intra_variance = problem["variances"][m]
            else:
                intra_variance = spread(recorded[m], "mean") if len(recorded[m]) >= 2 else None
            if intra_variance is None or not does_server_know:
                begin, num_steps = model, min(initial_steps, max_local_steps)
            else:
                others_weight = others_precision(m, counted, reported, inter_variance)
                own_weight = 1.0 / (inter_variance + intra_variance)
                own = recorded[m][-1] if recorded[m] else model
                begin = initial_model(model, own, own_weight, others_weight)
                num_steps = steps_of(intra_variance, inter_variance, others_weight, rate, form, max_local_steps)
            trained = descend(begin, gradient, rate, num_steps)
            personal[m] = trained
            extra = 0
            if augmented:
                trained, extra = converge(trained, gradient, rate, tolerance, max_convergence_steps)
            uploads.append(trained)
            reports.append(intra_variance)
            round_steps.append(num_steps)
            round_gradients.append(num_steps + extra)
        for m, upload, report in zip(cohort, uploads, reports, strict=True):
            recorded[m] = [*recorded[m], upload]
            reported[m] = report
        model, inter_variance = merge(
            problem,
            cohort,
            model,
            uploads,
            reported,
            inter_variance,
            known_inter=known_inter,
            variance_scale=variance_scale,
            smoothing=smoothing,
        )
        history.append(model)
        steps.append(round_steps)
        gradients.append(round_gradients)
    result = outcome(model, personal_or_global(personal, model, num_clients), history, steps, gradients)
    return result | {"reported": reported, "inter_variance": inter_variance}
