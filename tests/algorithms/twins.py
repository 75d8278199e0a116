"""The methods once more, one client at a time, in plain Python: the oracle of test_twins.py and test_cnn_twins.py.

Written from the publications and the decisions D1–D17, with nothing but floats and lists; the first of them *before*
the library's own algorithms were read. A model is a list of P floats. What a client's rows say of it is one function
of the problem, so that the same twin runs on the Gaussian loss and on a network.

Every run takes a *problem*, a dict of plain values:

    start       θ^0, P floats
    cohorts     the clients of each round: cohorts[t] is a list of client numbers
    gradient    gradient(t, m) is client m's in round t: a function of (model, draw) that gives P floats
    noise       noise(t, m) is client m's in round t: a function of (draw) that gives P normal numbers
    variances   σ_m², one float a client, where they are known
    rates       η_m, one float a client
    examples    N_m, one float a client
    batch_size  B; None: every draw is the whole data set, and B = 1
    clusters    the cluster of each client, where there are some
    head        the coordinates that are not shared, where there are some
    information information(t, m) is client m's in round t: a function of (model) that gives the rows of its first
                minibatch, P floats each, the surplus of each, of how many rows they are, and the loss's temperature
    terms       how often the loss counts in each client's log-likelihood
    groups      how many parameters vary alike between clients, group by group in the order they lie; none: all do
    classes     rows of each class, client by client; half_classes(m, split) has them by half of its rows
    bias        of each class, where its score's bias lies in the model, and which way it acts
    scorers     where all lie that scores are proportional to: the weights and the bias of the last layer
    scores      scores(t, m, half) is a function of (model) that gives the rows of that half's first minibatch: the
                scores of all classes, and the class of each row
    rows        rows(t, m) is a function of (model, draw) that gives each row of a minibatch: its features, the input of
                the last layer, the scores of all classes, and its class
    pull_back   pull_back(t, m) is a function of (model, draw, slopes of each row's scores, slopes of its features) that
                gives the gradient, P floats, of the sum of scores and features times their slopes
    all_rows    all_rows(m) is a function of (model) that gives all of client m's rows: features and class
    closing     the round after the last, whose minibatches clients go on with by themselves, once training is over

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


def descend(model, gradient, rate, steps, first_draw=0):
    for draw in range(first_draw, first_draw + steps):
        model = [x - rate * g for x, g in zip(model, gradient(model, draw), strict=True)]
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
        trained = [descend(model, problem["gradient"](t, m), problem["rates"][m], num_local_steps) for m in cohort]
        model = mean_model(trained, example_weights(problem, cohort, weighting))
        history.append(model)
        steps.append([num_local_steps] * len(cohort))
        gradients.append([num_local_steps] * len(cohort))
    return outcome(model, [model] * len(problem["examples"]), history, steps, gradients)


def run_fedprox(problem, *, num_local_steps, penalty, weighting="examples"):
    """FedAvg with μ(w_k − w) added to every gradient."""
    model, history, steps, gradients = problem["start"], [], [], []
    for t, cohort in enumerate(problem["cohorts"]):
        trained = []
        for m in cohort:
            gradient, own = problem["gradient"](t, m), model
            for draw in range(num_local_steps):
                pull = [penalty * (x - w) for x, w in zip(own, model, strict=True)]
                slope = gradient(own, draw)
                own = [x - problem["rates"][m] * (g + p) for x, g, p in zip(own, slope, pull, strict=True)]
            trained.append(own)
        model = mean_model(trained, example_weights(problem, cohort, weighting))
        history.append(model)
        steps.append([num_local_steps] * len(cohort))
        gradients.append([num_local_steps] * len(cohort))
    return outcome(model, [model] * len(problem["examples"]), history, steps, gradients)


def run_scaffold(problem, *, num_local_steps, global_rate=1.0):
    """Algorithm 1 of SCAFFOLD, option II: control variates c and c_i, which begin at zero."""
    model, size = problem["start"], len(problem["examples"])
    control, own_controls = [0.0] * len(model), [[0.0] * len(model) for _ in range(size)]
    history, steps, gradients = [], [], []
    for t, cohort in enumerate(problem["cohorts"]):
        moves, turns = [], []
        for m in cohort:
            gradient, rate, own = problem["gradient"](t, m), problem["rates"][m], model
            for draw in range(num_local_steps):
                slope = zip(own, gradient(own, draw), own_controls[m], control, strict=True)
                own = [y - rate * (g - mine + all_) for y, g, mine, all_ in slope]
            told = zip(own_controls[m], control, model, own, strict=True)
            new = [mine - all_ + (x - y) / (num_local_steps * rate) for mine, all_, x, y in told]
            moves.append([y - x for y, x in zip(own, model, strict=True)])
            turns.append([after - before for after, before in zip(new, own_controls[m], strict=True)])
            own_controls[m] = new
        step = mean_model(moves, [1.0] * len(cohort))
        model = [x + global_rate * d for x, d in zip(model, step, strict=True)]
        control = [c + math.fsum(d) / size for c, d in zip(control, zip(*turns, strict=True), strict=True)]
        history.append(model)
        steps.append([num_local_steps] * len(cohort))
        gradients.append([num_local_steps] * len(cohort))
    return outcome(model, [model] * size, history, steps, gradients)


def run_local(problem, *, num_local_steps):
    """Every client by itself, from the model it first received. The global model stays as it was sent."""
    model, memory, history, steps, gradients = problem["start"], {}, [], [], []
    for t, cohort in enumerate(problem["cohorts"]):
        for m in cohort:
            begin = memory.get(m, model)
            memory[m] = descend(begin, problem["gradient"](t, m), problem["rates"][m], num_local_steps)
        history.append(model)
        steps.append([num_local_steps] * len(cohort))
        gradients.append([num_local_steps] * len(cohort))
    personal = personal_or_global(memory, model, len(problem["examples"]))
    return outcome(model, personal, history, steps, gradients)


def run_ditto(problem, *, num_local_steps, penalty, weighting="examples"):
    """v ← v − η(∇f(v) + λ(v − w^t)) beside w_k ← w_k − η∇f(w_k); v stays on the client and is what is judged."""
    model, memory, history, steps, gradients = problem["start"], {}, [], [], []
    for t, cohort in enumerate(problem["cohorts"]):
        trained = []
        for m in cohort:
            gradient, rate = problem["gradient"](t, m), problem["rates"][m]
            shared, own = model, memory.get(m, model)
            for draw in range(num_local_steps):
                pull = [penalty * (v - w) for v, w in zip(own, model, strict=True)]
                own = [v - rate * (g + p) for v, g, p in zip(own, gradient(own, draw), pull, strict=True)]
                shared = [w - rate * g for w, g in zip(shared, gradient(shared, draw), strict=True)]
            memory[m] = own
            trained.append(shared)
        model = mean_model(trained, example_weights(problem, cohort, weighting))
        history.append(model)
        steps.append([num_local_steps] * len(cohort))
        gradients.append([2 * num_local_steps] * len(cohort))
    personal = personal_or_global(memory, model, len(problem["examples"]))
    return outcome(model, personal, history, steps, gradients)


def run_pfedme(problem, *, num_local_steps, personal_rates, penalty=15.0, inner_steps=5, mixing=1.0):
    """K inner steps θ ← θ − η_p(∇f(θ) + λ(θ − w_k)), then w_k ← w_k − ηλ(w_k − θ); w ← (1−β)w + β·mean. Judge θ.

    θ begins each round at the received model and goes on from one of the R steps to the next.
    """
    model, memory, history, steps, gradients = problem["start"], {}, [], [], []
    for t, cohort in enumerate(problem["cohorts"]):
        uploads = []
        for m in cohort:
            gradient, rate, personal_rate = problem["gradient"](t, m), problem["rates"][m], personal_rates[m]
            theta, local = model, model
            for draw in range(num_local_steps):
                for _ in range(inner_steps):
                    pull = [penalty * (x - w) for x, w in zip(theta, local, strict=True)]
                    slope = gradient(theta, draw)
                    theta = [x - personal_rate * (g + p) for x, g, p in zip(theta, slope, pull, strict=True)]
                local = [w - rate * penalty * (w - x) for w, x in zip(local, theta, strict=True)]
            memory[m] = theta
            uploads.append(local)
        model = blend(model, mean_model(uploads, [1.0] * len(cohort)), mixing)
        history.append(model)
        steps.append([num_local_steps] * len(cohort))
        gradients.append([num_local_steps * inner_steps] * len(cohort))
    personal = personal_or_global(memory, model, len(problem["examples"]))
    return outcome(model, personal, history, steps, gradients)


def run_perfedavg(problem, *, num_local_steps, inner_rates, hessian_free=False, difference=1e-3, adaptation_steps=1):
    """w' = w − α∇f(w), then w ← w − β∇f(w'); Hessian-free: w ← w − β(g' − αH(w)g'), Hg' by central difference.

    β is the client's learning rate. The personal model is the global one after one step of size α, on the data as it
    stands when the run is over, in the round after the last.
    """
    model, history, steps, gradients = problem["start"], [], [], []
    for t, cohort in enumerate(problem["cohorts"]):
        uploads = []
        for m in cohort:
            gradient, inner_rate, outer_rate = problem["gradient"](t, m), inner_rates[m], problem["rates"][m]
            local, num_batches = model, 3 if hessian_free else 2
            for draw in range(0, num_batches * num_local_steps, num_batches):
                adapted = [w - inner_rate * g for w, g in zip(local, gradient(local, draw), strict=True)]
                meta = gradient(adapted, draw + 1)
                if hessian_free:
                    ahead = gradient([w + difference * g for w, g in zip(local, meta, strict=True)], draw + 2)
                    behind = gradient([w - difference * g for w, g in zip(local, meta, strict=True)], draw + 2)
                    curvature = [(a - b) / (2.0 * difference) for a, b in zip(ahead, behind, strict=True)]
                    meta = [g - inner_rate * c for g, c in zip(meta, curvature, strict=True)]
                local = [w - outer_rate * g for w, g in zip(local, meta, strict=True)]
            uploads.append(local)
        model = mean_model(uploads, [1.0] * len(cohort))
        history.append(model)
        steps.append([num_local_steps] * len(cohort))
        gradients.append([num_local_steps * (4 if hessian_free else 2)] * len(cohort))
    now, clients = len(problem["cohorts"]), range(len(problem["examples"]))
    personal = [descend(model, problem["gradient"](now, m), inner_rates[m], adaptation_steps) for m in clients]
    return outcome(model, personal, history, steps, gradients)


def run_apfl(problem, *, num_local_steps, mixing=0.5, adaptive=True):
    """w ← w − η∇f(w), v ← v − ηα∇f(m) and α ← α − η⟨v − w, ∇f(m)⟩ in [0, 1], with m = αv + (1 − α)w as it was before.

    α moves in a round's first step. w begins each round at the received model, v and α where they were left. Judge
    αv + (1 − α)w with the global w.
    """
    model, memory, history, steps, gradients = problem["start"], {}, [], [], []
    for t, cohort in enumerate(problem["cohorts"]):
        trained = []
        for m in cohort:
            gradient, rate = problem["gradient"](t, m), problem["rates"][m]
            shared, (own, alpha) = model, memory.get(m, (model, mixing))
            for draw in range(num_local_steps):
                slope = gradient(blend(shared, own, alpha), draw)
                along = math.fsum((v - w) * g for v, w, g in zip(own, shared, slope, strict=True))
                own = [v - rate * alpha * g for v, g in zip(own, slope, strict=True)]
                shared = [w - rate * g for w, g in zip(shared, gradient(shared, draw), strict=True)]
                if adaptive and draw == 0:
                    alpha = min(1.0, max(0.0, alpha - rate * along))
            memory[m] = own, alpha
            trained.append(shared)
        model = mean_model(trained, [1.0] * len(cohort))
        history.append(model)
        steps.append([num_local_steps] * len(cohort))
        gradients.append([2 * num_local_steps] * len(cohort))
    personal = [blend(model, *memory.get(m, (model, 0.0))) for m in range(len(problem["examples"]))]
    return outcome(model, personal, history, steps, gradients)


def adam(before, slope, rate, number):
    """A step of Adam: how far each of some numbers goes. ``before`` is (m, v) of each, and is brought up to date."""
    way = []
    for i, g in enumerate(slope):
        m, v = before.setdefault(i, (0.0, 0.0))
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        before[i] = m, v
        way.append(rate * (m / (1.0 - 0.9 ** (number + 1))) / (math.sqrt(v / (1.0 - 0.999 ** (number + 1))) + 1e-8))
    return way


def run_pfedbayes(problem, *, num_local_steps, inner_steps=5, tempering=10.0, rate=1e-3, deviation=0.079, mixing=1.0):
    """q = N(μ, σ²) goes down f(μ + σε) + ζ/N KL(q‖w) and w = N(ν, τ²) down ζ/N KL(q‖w), σ = log(1 + e^ρ); judge μ.

    R times: Adam's steps of q on one minibatch and one ε, then one of the client's w. The server's w is moved by β of
    the mean change of the clients'. q stays on the client, and begins as w.
    """

    def soft(rho):
        return math.log1p(math.exp(rho))

    def slope_of_soft(rho):
        return 1.0 / (1.0 + math.exp(-rho))

    size, model = len(problem["start"]), problem["start"]
    shared = [*model, *[math.log(math.exp(deviation) - 1.0)] * size]  # ν, then its ρ
    memory, history, steps, gradients = {}, [], [], []
    for t, cohort in enumerate(problem["cohorts"]):
        uploads = []
        for m in cohort:
            gradient, noise, share = problem["gradient"](t, m), problem["noise"](t, m), tempering / problem["terms"][m]
            own, other, of_own, of_other = list(memory.get(m, shared)), list(shared), {}, {}
            step = rate[m] if isinstance(rate, list) else rate
            for draw in range(num_local_steps):
                drawn = noise(draw)
                for inner in range(inner_steps):
                    sigma, tau = [soft(r) for r in own[size:]], [soft(r) for r in other[size:]]
                    g = gradient([own[i] + sigma[i] * drawn[i] for i in range(size)], draw)
                    slope = [g[i] + share * (own[i] - other[i]) / tau[i] ** 2 for i in range(size)]
                    for i in range(size):
                        by_sigma = g[i] * drawn[i] + share * (sigma[i] / tau[i] ** 2 - 1.0 / sigma[i])
                        slope.append(by_sigma * slope_of_soft(own[size + i]))
                    way = adam(of_own, slope, step, draw * inner_steps + inner)
                    own = [x - d for x, d in zip(own, way, strict=True)]
                sigma, tau = [soft(r) for r in own[size:]], [soft(r) for r in other[size:]]
                slope = [share * (other[i] - own[i]) / tau[i] ** 2 for i in range(size)]
                for i in range(size):
                    by_tau = share * (1.0 / tau[i] - (sigma[i] ** 2 + (own[i] - other[i]) ** 2) / tau[i] ** 3)
                    slope.append(by_tau * slope_of_soft(other[size + i]))
                other = [x - d for x, d in zip(other, adam(of_other, slope, step, draw), strict=True)]
            memory[m] = own
            uploads.append(other)
        shared = blend(shared, mean_model(uploads, [1.0] * len(cohort)), mixing)
        history.append(shared[:size])
        steps.append([num_local_steps] * len(cohort))
        gradients.append([num_local_steps * inner_steps] * len(cohort))
    personal = [memory.get(m, shared)[:size] for m in range(len(problem["examples"]))]
    return outcome(shared[:size], personal, history, steps, gradients)


def run_fedper(problem, *, num_local_steps, head_steps=None, weighting="examples"):
    """The global body with the client's own head, trained together; with head_steps (FedRep) the head first, then the
    body. Bodies are averaged; the server's head stays as it began. Judge the global body with the client's head.
    """
    head, model = set(problem["head"]), problem["start"]
    body = set(range(len(model))) - head
    heads, history, steps, gradients = {}, [], [], []

    def with_head(m):
        return [heads[m][i] if m in heads and i in head else x for i, x in enumerate(model)]

    def only(gradient, moving):
        return lambda own, draw: [g if i in moving else 0.0 for i, g in enumerate(gradient(own, draw))]

    for t, cohort in enumerate(problem["cohorts"]):
        trained = []
        for m in cohort:
            gradient, rate, own = problem["gradient"](t, m), problem["rates"][m], with_head(m)
            if head_steps is None:
                own = descend(own, gradient, rate, num_local_steps)
            else:
                own = descend(own, only(gradient, head), rate, head_steps)
                own = descend(own, only(gradient, body), rate, num_local_steps, head_steps)
            trained.append(own)
        for m, own in zip(cohort, trained, strict=True):
            heads[m] = {i: own[i] for i in head}
        mean = mean_model(trained, example_weights(problem, cohort, weighting))
        model = [problem["start"][i] if i in head else x for i, x in enumerate(mean)]
        history.append(model)
        steps.append([num_local_steps] * len(cohort))
        gradients.append([(head_steps or 0) + num_local_steps] * len(cohort))
    return outcome(model, [with_head(m) for m in range(len(problem["examples"]))], history, steps, gradients)


def run_feddpa(problem, *, num_local_steps, mixing=0.5, weighting="examples"):
    """w by FedAvg. Beside it the client's own v, by the gradient of v in a v + (1 - a) w with w as it was received.
    Judge the mixture with the latest w.
    """
    model, memory, history, steps, gradients = problem["start"], {}, [], [], []

    def mixed(own, shared):
        return [mixing * v + (1.0 - mixing) * w for v, w in zip(own, shared, strict=True)]

    for t, cohort in enumerate(problem["cohorts"]):
        trained = []
        for m in cohort:
            gradient, rate = problem["gradient"](t, m), problem["rates"][m]
            trained.append(descend(model, gradient, rate, num_local_steps))
            own = memory.get(m, model)
            for draw in range(num_local_steps):
                slope = gradient(mixed(own, model), draw)
                own = [v - rate * mixing * g for v, g in zip(own, slope, strict=True)]
            memory[m] = own
        model = mean_model(trained, example_weights(problem, cohort, weighting))
        history.append(model)
        steps.append([num_local_steps] * len(cohort))
        gradients.append([2 * num_local_steps] * len(cohort))
    personal = [mixed(memory.get(m, model), model) for m in range(len(problem["examples"]))]
    return outcome(model, personal, history, steps, gradients)


def run_fedbabu(problem, *, num_local_steps, epochs, weighting="equal"):
    """L steps of the body under a head that stays as it began; bodies are averaged. At the end everybody who took part
    tunes the whole model for some epochs, ceil(N/B) steps each, on the minibatches of the round after the last.
    """
    head, model, history, steps, gradients = set(problem["head"]), problem["start"], [], [], []
    for t, cohort in enumerate(problem["cohorts"]):
        bodies = []
        for m in cohort:
            gradient, own = problem["gradient"](t, m), model
            for draw in range(num_local_steps):
                slope = enumerate(zip(own, gradient(own, draw), strict=True))
                own = [x if i in head else x - problem["rates"][m] * g for i, (x, g) in slope]
            bodies.append(own)
        model = mean_model(bodies, example_weights(problem, cohort, weighting))
        model = [problem["start"][i] if i in head else x for i, x in enumerate(model)]
        history.append(model)
        steps.append([num_local_steps] * len(cohort))
        gradients.append([num_local_steps] * len(cohort))
    seen, now, size = {m for cohort in problem["cohorts"] for m in cohort}, len(history), problem["batch_size"]
    closed = []
    for m, count in enumerate(problem["examples"]):
        passes = epochs * (1 if size is None else math.ceil(count / size))
        tuned = descend(model, problem["gradient"](now, m), problem["rates"][m], passes if m in seen else 0)
        closed.append(tuned)
    found = outcome(model, [model] * len(problem["examples"]), history, steps, gradients)
    return found | {"closed": closed}


def run_fedala(problem, *, num_local_steps, share=0.8, mixing_rate=1.0, first_passes=11, weighting="examples"):
    """θ̂ = θ + (Θ − θ)W in the head and Θ in the body; W by gradient steps at θ̂, clipped to [0, 1], on minibatches that
    hold a share of the rows, the first time several times as many; then L steps from θ̂. Judge θ̂, learned anew.
    """
    head, model, size = set(problem["head"]), problem["start"], problem["batch_size"]
    memory, history, steps, gradients = {}, [], [], []

    def mixture(t, m):
        """θ̂, W and the number of gradients."""
        if m not in memory:
            return model, [1.0] * len(model), 0
        own, weights, is_first = memory[m]
        own = [x if i in head else g for i, (x, g) in enumerate(zip(own, model, strict=True))]
        in_a_pass = 1 if size is None else math.ceil(share * problem["examples"][m] / size - 1e-9)
        number = in_a_pass * (first_passes if is_first else 1)
        for draw in range(number):
            mixed = [x + (g - x) * w for x, g, w in zip(own, model, weights, strict=True)]
            turn = zip(weights, problem["gradient"](t, m)(mixed, draw), own, model, strict=True)
            weights = [min(1.0, max(0.0, w - mixing_rate * slope * (g - x))) for w, slope, x, g in turn]
        return [x + (g - x) * w for x, g, w in zip(own, model, weights, strict=True)], weights, number

    for t, cohort in enumerate(problem["cohorts"]):
        trained, spent = {}, []
        for m in cohort:
            start, weights, number = mixture(t, m)
            own = descend(start, problem["gradient"](t, m), problem["rates"][m], num_local_steps)
            trained[m] = own, weights, m not in memory
            spent.append(number + num_local_steps)
        memory |= trained
        model = mean_model([trained[m][0] for m in cohort], example_weights(problem, cohort, weighting))
        history.append(model)
        steps.append([num_local_steps] * len(cohort))
        gradients.append(spent)
    personal = [mixture(len(history), m)[0] for m in range(len(problem["examples"]))]
    return outcome(model, personal, history, steps, gradients)


def softmax(scores):
    most = max(scores)
    parts = [math.exp(score - most) for score in scores]
    return [part / math.fsum(parts) for part in parts]


def error_of(scores, label, size):
    """Slope of the mean cross-entropy of ``size`` rows by the scores of one of them."""
    return [(p - (k == label)) / size for k, p in enumerate(softmax(scores))]


def linear(head, features, num_classes):
    """W z + c of a head whose numbers lie row by row, c behind W."""
    width = len(features)
    return [
        math.fsum(head[k * width + i] * z for i, z in enumerate(features)) + head[num_classes * width + k]
        for k in range(num_classes)
    ]


def run_fedrod(problem, *, num_local_steps, weighting="examples"):
    """φ and H by CE(H φ + log n_m), a client's h by CE(H φ + h φ), both from the same pass; n-weighted mean of φ and H.

    h begins at 0 and stays on the client. Judge H + h on the global φ.
    """
    model, heads, history, steps, gradients = problem["start"], {}, [], [], []
    place = sorted(problem["head"])
    for t, cohort in enumerate(problem["cohorts"]):
        trained = []
        for m in cohort:
            rate, counts, shared = problem["rates"][m], problem["classes"][m], model
            own = heads.get(m, [0.0] * len(place))
            prior = [math.log(n) if n else -math.inf for n in counts]
            for draw in range(num_local_steps):
                rows = problem["rows"](t, m)(shared, draw)
                slopes, turn = [], [0.0] * len(own)
                for features, scores, label in rows:
                    balanced = [g + p for g, p in zip(scores, prior, strict=True)]
                    slopes.append(error_of(balanced, label, len(rows)))
                    added = linear(own, features, len(counts))
                    error = error_of([g + p for g, p in zip(scores, added, strict=True)], label, len(rows))
                    for k, e in enumerate(error):
                        for i, z in enumerate(features):
                            turn[k * len(features) + i] += e * z
                        turn[len(counts) * len(features) + k] += e
                still = [[0.0] * len(features) for features, *_ in rows]
                slope = problem["pull_back"](t, m)(shared, draw, slopes, still)
                shared = [x - rate * g for x, g in zip(shared, slope, strict=True)]
                own = [x - rate * g for x, g in zip(own, turn, strict=True)]
            heads[m] = own
            trained.append(shared)
        model = mean_model(trained, example_weights(problem, cohort, weighting))
        history.append(model)
        steps.append([num_local_steps] * len(cohort))
        gradients.append([num_local_steps] * len(cohort))
    personal = []
    for m in range(len(problem["examples"])):
        both = list(model)
        for i, h in zip(place, heads.get(m, []), strict=False):
            both[i] += h
        personal.append(both)
    return outcome(model, personal, history, steps, gradients)


def run_feddbe(problem, *, num_local_steps, penalty=50.0, weighting="examples"):
    """φ, W, c and a client's b by CE(W(z + b) + c) + κ/2 mean_i((mean of z_i over the minibatch − r_i)²), z = φ(x).

    The first round is FedAvg's; r is the mean over its clients of the mean feature of an epoch's minibatches, under the
    model that each has trained. b begins at 0 and stays on the client. Judge W(z + b) + c, by a bias c + W b.
    """
    model, shifts, history, steps, gradients = problem["start"], {}, [], [], []
    place, centre = sorted(problem["head"]), None
    num_classes = len(problem["classes"][0])
    width = len(place) // num_classes - 1

    def pushed(own, shift):
        """W b."""
        return [math.fsum(own[place[k * width + i]] * b for i, b in enumerate(shift)) for k in range(num_classes)]

    for t, cohort in enumerate(problem["cohorts"]):
        trained, means = [], []
        for m in cohort:
            rate, own, shift = problem["rates"][m], model, shifts.get(m, [0.0] * width)
            for draw in range(num_local_steps):
                rows = problem["rows"](t, m)(own, draw)
                size, add = len(rows), pushed(own, shift)
                slopes = [
                    error_of([g + a for g, a in zip(scores, add, strict=True)], label, size)
                    for _, scores, label in rows
                ]
                error = [math.fsum(slope[k] for slope in slopes) for k in range(num_classes)]
                pull, turn = [0.0] * width, [0.0] * width
                if centre is not None:
                    middle = [math.fsum(z[i] for z, *_ in rows) / size for i in range(width)]
                    pull = [penalty * (a - r) / width / size for a, r in zip(middle, centre, strict=True)]
                    turn = [
                        math.fsum(own[place[k * width + i]] * error[k] for k in range(num_classes))
                        for i in range(width)
                    ]
                slope = problem["pull_back"](t, m)(own, draw, slopes, [pull] * size)
                for k in range(num_classes):
                    for i in range(width):
                        slope[place[k * width + i]] += error[k] * shift[i]
                own = [x - rate * g for x, g in zip(own, slope, strict=True)]
                shift = [b - rate * g for b, g in zip(shift, turn, strict=True)]
            trained.append(own)
            if centre is None:
                seen = [
                    problem["rows"](t, m)(own, d)
                    for d in range(math.ceil(problem["examples"][m] / problem["batch_size"]))
                ]
                every = [z for rows in seen for z, *_ in rows]
                means.append([math.fsum(z[i] for z in every) / len(every) for i in range(width)])
            else:
                shifts[m] = shift
        weights = example_weights(problem, cohort, weighting)
        model = mean_model(trained, weights)
        centre = mean_model(means, weights) if centre is None else centre
        history.append(model)
        steps.append([num_local_steps] * len(cohort))
        gradients.append([num_local_steps] * len(cohort))
    personal = []
    for m in range(len(problem["examples"])):
        own = list(model)
        for k, add in enumerate(pushed(model, shifts.get(m, [0.0] * width))):
            own[place[num_classes * width + k]] += add
        personal.append(own)
    return outcome(model, personal, history, steps, gradients)


def best_mixture(matrix):
    """The weights, from 0 up and 1 together, with the least a'Qa: the best of all sets of places that are above 0."""
    best, found = math.inf, None
    for chosen in range(1, 2 ** len(matrix)):
        places = [i for i in range(len(matrix)) if chosen >> i & 1]
        part = solved([[matrix[i][j] for j in places] for i in places], [1.0] * len(places))
        if min(part) > 0.0 and 1.0 / math.fsum(part) < best:
            best, found = 1.0 / math.fsum(part), dict(zip(places, part, strict=True))
    weights = [found.get(i, 0.0) / math.fsum(found.values()) for i in range(len(matrix))]
    kept = [w if w >= 1e-3 else 0.0 for w in weights]
    return [w / math.fsum(kept) for w in kept]


def solved(matrix, right):
    """x with matrix x = right, by elimination."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(len(rows)):
        pivot = max(range(i, len(rows)), key=lambda j: abs(rows[j][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for j in range(len(rows)):
            if j != i:
                factor = rows[j][i] / rows[i][i]
                rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i], strict=True)]
    return [row[-1] / row[i] for i, row in enumerate(rows)]


def means_by_class(rows, num_classes):
    """Of each class its rows, the mean of their features (zeros where there are none) and of their squared lengths."""
    size, found = len(rows[0][0]), []
    for k in range(num_classes):
        own = [features for features, label in rows if label == k]
        mean = [math.fsum(z) / len(own) for z in zip(*own, strict=True)] if own else [0.0] * size
        square = math.fsum(z * z for features in own for z in features) / len(own) if own else 0.0
        found.append((len(own), mean, square))
    return found


def run_fedpac(problem, *, num_local_steps, head_steps, alignment=1.0, head_rate=None):
    """The head first, then the body by CE + λ mean (z − c_y)², c the mean features of each class over clients.

    Client i's next head is Σ_j α_ij h_j over the cohort, α_i the least α'(diag(v) + D_i)α, which are taken at the model
    as it came: v_j = (Σ p E|z|² − Σ p²|μ|²)/N, D_i the products of p μ less client i's. Models are averaged by rows,
    prototypes, which are taken after training, by the rows of their class. Judge what a client's training left.
    """
    model, own_heads, prototypes, memory, history, steps, gradients = problem["start"], {}, {}, {}, [], [], []
    head, num_classes = set(problem["head"]), len(problem["classes"][0])
    for t, cohort in enumerate(problem["cohorts"]):
        trained, seen, left = [], [], []
        for m in cohort:
            own = [own_heads[m][i] if m in own_heads and i in head else x for i, x in enumerate(model)]
            seen.append(means_by_class(problem["all_rows"](m)(own), num_classes))
            rate, slope = problem["rates"][m], problem["gradient"](t, m)
            for draw in range(head_steps):
                turn = slope(own, draw)
                own = [
                    x - (head_rate or rate) * g if i in head else x
                    for i, (x, g) in enumerate(zip(own, turn, strict=True))
                ]
            for draw in range(head_steps, head_steps + num_local_steps):
                rows = problem["rows"](t, m)(own, draw)
                by_scores = [error_of(scores, label, len(rows)) for _, scores, label in rows]
                by_features = []
                for features, _, label in rows:
                    goal = prototypes.get(label, features)
                    size = len(features) * len(rows)
                    by_features.append([2 * alignment * (z - c) / size for z, c in zip(features, goal, strict=True)])
                turn = problem["pull_back"](t, m)(own, draw, by_scores, by_features)
                own = [x if i in head else x - rate * g for i, (x, g) in enumerate(zip(own, turn, strict=True))]
            memory[m] = own
            trained.append(own)
            left.append(means_by_class(problem["all_rows"](m)(own), num_classes))
        noise, placed = [], []
        for m, found in zip(cohort, seen, strict=True):
            total = problem["examples"][m]
            noise.append(
                math.fsum(n / total * square - (n / total) ** 2 * norm(mean) ** 2 for n, mean, square in found) / total
            )
            placed.append([n / total * z for n, mean, _ in found for z in mean])
        for i, m in enumerate(cohort):
            gaps = [[a - b for a, b in zip(placed[i], other, strict=True)] for other in placed]
            products = [[math.fsum(a * b for a, b in zip(one, two, strict=True)) for two in gaps] for one in gaps]
            matrix = [[x + noise[j] * (j == k) for k, x in enumerate(row)] for j, row in enumerate(products)]
            own_heads[m] = mean_model(trained, best_mixture(matrix))
        for k in range(num_classes):
            counts = [found[k][0] for found in left]
            if sum(counts):
                prototypes[k] = mean_model([found[k][1] for found in left], counts)
        model = mean_model(trained, example_weights(problem, cohort, "examples"))
        history.append(model)
        steps.append([num_local_steps] * len(cohort))
        gradients.append([head_steps + num_local_steps] * len(cohort))
    personal = personal_or_global(memory, model, len(problem["examples"]))
    return outcome(model, personal, history, steps, gradients)


# ------------------------------------------------------------------------------------------------------------- Self-FL


def others_precision(m, counted, reported, inter_variance):
    """S_m = Σ_{k≠m} 1/(σ_0² + σ_k²) from the reports the server holds; D3: the unknown count as the mean known."""
    filled = assumed(reported)
    return math.fsum(1.0 / (inter_variance + filled[k]) for k in counted if k != m)


def assumed(reported):
    """D3: the unknown count as the mean of the known; None while nobody is known."""
    known = [value for value in reported if value is not None]
    usual = math.fsum(known) / len(known) if known else None
    return [usual if value is None else value for value in reported]


def steps_of(intra_variance, inter_variance, others, rate, form, max_local_steps):
    """ℓ_m of (1 − η/σ_m²)^ℓ = S/(1/σ_m² + S) (η is η/B), as D7 rounds it; exact: P = 1/(σ_0² + 1/S) for S."""
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


def server_half(problem, cohort, uploads, reported, inter_variance, *, known_inter, variance_scale, by_examples):
    """σ_0² first (D8: a cohort of one leaves it), then the weights and the new estimate."""
    if known_inter is None and len(cohort) > 1:
        inter_variance = spread(uploads, variance_scale)
    filled = assumed(reported)
    weights = [1.0 if filled[m] is None else 1.0 / (inter_variance + filled[m]) for m in cohort]
    if by_examples:
        weights = [problem["examples"][m] for m in cohort]
    return mean_model(uploads, weights), inter_variance


class Clusters:
    """The server's half at cluster level (D12): a cluster takes the place of a client.

    Members estimate one parameter, so that they weigh 1/σ_m² and the representative has variance 1/Σ 1/σ_m². While
    nobody of them is known they are equal and the representative is unknown; some known: D3 among clients.
    """

    def __init__(self, of_client, number, known):
        self.of_client, self.number = of_client, number
        self.models, self.examples, self.variances = {}, {}, [None] * number
        for c in range(number):  # with stated variances, that of the whole cluster until somebody answers
            members = [known[m] for m in range(len(of_client)) if of_client[m] == c and known[m] is not None]
            self.variances[c] = 1.0 / math.fsum(1.0 / value for value in members) if members else None

    def hear(self, problem, cohort, uploads, reports, reported, by_examples):
        filled = assumed(reported)
        for c in {self.of_client[m] for m in cohort}:
            members = [k for k, m in enumerate(cohort) if self.of_client[m] == c]
            weights = [1.0 if filled[cohort[k]] is None else 1.0 / filled[cohort[k]] for k in members]
            is_known = any(reports[k] is not None for k in members)
            self.variances[c] = 1.0 / math.fsum(weights) if is_known else None
            rows = [problem["examples"][cohort[k]] for k in members]
            self.examples[c] = math.fsum(rows)
            self.models[c] = mean_model([uploads[k] for k in members], rows if by_examples else weights)

    def aggregate(self, inter_variance, *, known_inter, variance_scale, by_examples):
        heard = sorted(self.models)
        problem = {"examples": [self.examples.get(c) for c in range(self.number)]}
        return server_half(
            problem,
            heard,
            [self.models[c] for c in heard],
            self.variances,
            inter_variance,
            known_inter=known_inter,
            variance_scale=variance_scale,
            by_examples=by_examples,
        )


def quantile_clusters(reported, number):
    """⌊K · share of the known variances that lie below the client's⌋; unknown: below the mean known; nobody: 0."""
    known = [value for value in reported if value is not None]
    if not known:
        return [0] * len(reported)
    below = [sum(other < min(value, max(known)) for other in known) for value in assumed(reported)]
    return [number * count // len(known) for count in below]


def window_of(problem, m):
    """Steps over which client m's progress is measured, and every how many: D14's, whole epochs, ten steps or more."""
    if problem["batch_size"] is None:
        return 1, 10
    epoch = math.ceil(problem["examples"][m] / problem["batch_size"])
    whole = epoch * math.ceil(10 / epoch)
    return whole, whole


def converge(model, gradient, rate, tolerance, max_convergence_steps, window, every, first_draw):
    """Steps until |θ_s − θ_(s−w)| ≤ tolerance·w·(1 + |θ_(s−w)|), looked at at every so many steps."""
    models = [model]
    while len(models) <= max_convergence_steps:
        models.append(descend(models[-1], gradient, rate, 1, first_draw + len(models) - 1))
        taken = len(models) - 1
        if taken % every == 0:
            before = models[taken - window]
            moved = norm([a - b for a, b in zip(models[-1], before, strict=True)])
            if moved <= tolerance * window * (1.0 + norm(before)):
                break
    return models[-1], len(models) - 1


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
    adaptive_start=True,
    adaptive_steps=True,
    uncertainty_weights=True,
    augmented=False,
    tolerance=0.0,
    max_convergence_steps=0,
    clusters=None,
    num_clusters=0,
):
    """Algorithm 1, or Algorithm 2 if augmented; at cluster level if clusters is "column" or "variance".

    With known_inter (σ_0²) every σ_m² is known too, to the client and to the server, from the start. The run also
    returns what the server holds: the last reported variance of each client (None: never known), and σ_0².
    """
    is_known = known_inter is not None
    num_clients = len(problem["examples"])
    model, inter_variance = problem["start"], known_inter if is_known else 0.0
    reported = list(problem["variances"]) if is_known else [None] * num_clients
    personal, recorded = {}, {m: [] for m in range(num_clients)}  # recorded: θ_m^t, or θ_{m,t} if augmented
    history, steps, gradients = [], [], []
    server = {"known_inter": known_inter, "variance_scale": variance_scale, "by_examples": not uncertainty_weights}
    groups = None
    if clusters == "column":
        groups = Clusters(problem["clusters"], max(problem["clusters"]) + 1, reported)
    elif clusters == "variance":
        groups = Clusters(quantile_clusters(reported, num_clusters), num_clusters, reported)
    for t, cohort in enumerate(problem["cohorts"]):
        units, of_client = (reported, range(num_clients)) if groups is None else (groups.variances, groups.of_client)
        counted = {of_client[m] for m in (cohort if others == "cohort" else range(num_clients))}
        does_server_know = any(value is not None for value in units)
        uploads, reports, round_steps, round_gradients = [], [], [], []
        for m in cohort:
            gradient, rate = problem["gradient"](t, m), problem["rates"][m]
            if is_known:
                intra_variance = problem["variances"][m]
            else:
                intra_variance = spread(recorded[m], "mean") if len(recorded[m]) >= 2 else None
            begin, num_steps = model, min(initial_steps, max_local_steps)
            if intra_variance is not None and does_server_know:
                others_weight = others_precision(of_client[m], counted, units, inter_variance)
                own_weight = 1.0 / (inter_variance + intra_variance)
                own = recorded[m][-1] if recorded[m] else model
                if adaptive_start:
                    begin = initial_model(model, own, own_weight, others_weight)
                if adaptive_steps:
                    per_slot = rate / (problem["batch_size"] or 1)
                    num_steps = steps_of(intra_variance, inter_variance, others_weight, per_slot, form, max_local_steps)
            trained = descend(begin, gradient, rate, num_steps)
            personal[m] = trained
            extra = 0
            if augmented:
                window = window_of(problem, m)
                trained, extra = converge(
                    trained, gradient, rate, tolerance, max_convergence_steps, *window, max_local_steps
                )
            uploads.append(trained)
            reports.append(intra_variance)
            round_steps.append(num_steps)
            round_gradients.append(num_steps + extra)
        for m, upload, report in zip(cohort, uploads, reports, strict=True):
            recorded[m] = [*recorded[m], upload]
            reported[m] = report
        if groups is None:
            estimate, inter_variance = server_half(problem, cohort, uploads, reported, inter_variance, **server)
        else:
            groups.hear(problem, cohort, uploads, reports, reported, not uncertainty_weights)
            estimate, inter_variance = groups.aggregate(inter_variance, **server)
            if clusters == "variance":
                groups.of_client = quantile_clusters(reported, num_clusters)
        model = blend(model, estimate, smoothing)
        history.append(model)
        steps.append(round_steps)
        gradients.append(round_gradients)
    result = outcome(model, personal_or_global(personal, model, num_clients), history, steps, gradients)
    return result | {"reported": reported, "inter_variance": inter_variance}


def run_self_fl_sums(
    problem, *, smoothing, max_local_steps, initial_steps, form="paper", variance_scale="sum", others="cohort",
    clip=math.inf, max_weight=math.inf,
):  # fmt: skip
    """D16, with every client's model at hand: the centre and the spread are taken about the weighted mean itself.

    The average client's total variance is the harmonic mean of the last cohort's, moved as σ_0² has moved since.
    """
    num_clients = len(problem["examples"])
    model, inter_variance, usual = problem["start"], 0.0, 0.0  # usual: σ² of an average client
    personal, recorded = {}, {m: [] for m in range(num_clients)}
    history, steps, gradients = [], [], []
    for t, cohort in enumerate(problem["cohorts"]):
        average = inter_variance + usual
        number = len(cohort) if others == "cohort" else num_clients
        uploads, weights, round_steps = [], [], []
        for m in cohort:
            gradient, rate = problem["gradient"](t, m), problem["rates"][m]
            begin, num_steps, weight = model, min(initial_steps, max_local_steps), 1.0
            if len(recorded[m]) >= 2 and average > 0.0:
                intra_variance = spread(recorded[m], "mean")
                others_weight = (number - 1) / average
                begin = initial_model(model, recorded[m][-1], 1.0 / (inter_variance + intra_variance), others_weight)
                per_slot = rate / (problem["batch_size"] or 1)
                num_steps = steps_of(intra_variance, inter_variance, others_weight, per_slot, form, max_local_steps)
                weight = min(average / (inter_variance + intra_variance), max_weight)
            trained = descend(begin, gradient, rate, num_steps)
            personal[m] = trained
            recorded[m] = [*recorded[m], trained]
            change = [x - y for x, y in zip(trained, model, strict=True)]
            shrunk = min(1.0, clip / norm(change)) if norm(change) else 1.0
            uploads.append([y + shrunk * d for y, d in zip(model, change, strict=True)])
            weights.append(weight)
            round_steps.append(num_steps)
        centre = mean_model(uploads, weights)
        harmonic = average * len(cohort) / math.fsum(weights)
        usual = max(harmonic - inter_variance, 0.0)
        if len(cohort) > 1:
            distance = [math.fsum((x - c) ** 2 for x, c in zip(model_m, centre, strict=True)) for model_m in uploads]
            inter_variance = math.fsum(w * d for w, d in zip(weights, distance, strict=True)) / math.fsum(weights)
            inter_variance *= len(cohort) if variance_scale == "sum" else 1
        model = blend(model, centre, smoothing)
        history.append(model)
        steps.append(round_steps)
        gradients.append(round_steps)
    result = outcome(model, personal_or_global(personal, model, num_clients), history, steps, gradients)
    return result | {"usual": usual, "inter_variance": inter_variance}


# --------------------------------------------------------------------------------------- Self-FL with learned variances


def moved(old, new, learning):
    """A share of the way, of logarithms; the first estimate is taken as it is, and one that is none not at all."""
    if new is None or not 0.0 < new < math.inf:
        return old
    return new if old is None else old * (new / old) ** learning


def held_descent(own, centre, slope, rate, held, num_steps, momentum, skipped):
    """Steps with momentum, each followed by a pull towards the centre, as strong as each parameter is held; the mean
    over the last of them."""
    velocity, kept = [0.0] * len(own), []
    for draw in range(num_steps):
        velocity = [momentum * v + g for v, g in zip(velocity, slope(own, draw), strict=True)]
        own = [x - rate * v for x, v in zip(own, velocity, strict=True)]
        pulls = [rate * h * math.fsum(momentum**i for i in range(draw + 1)) for h in held]
        own = [(x + pull * c) / (1.0 + pull) for x, c, pull in zip(own, centre, pulls, strict=True)]
        if draw >= math.floor(skipped * num_steps):
            kept.append(own)
    return mean_model(kept, [1.0] * len(kept))


def most_likely_factors(old, curvature, pull, most, least_of_scores, most_of_frequencies):
    """t and a by their quadratic log-likelihood and their prior, N(1, 1) each: two equations in two unknowns."""
    (a, b), (c, d) = curvature
    a, d, x, y = a + 1.0, d + 1.0, pull[0] + 1.0, pull[1] + 1.0
    whole = a * d - b * c
    found = [(d * x - b * y) / whole, (a * y - c * x) / whole]
    found = [min(max(new, was - most), was + most) for new, was in zip(found, old, strict=True)]
    of_scores = max(found[0], least_of_scores)
    return [of_scores, min(max(found[1], 0.0), most_of_frequencies * of_scores)]


def changed(old, new, change):
    """A variance after a round: at most so many times what it was, and at least one over that."""
    return min(max(new, old / change), old * change)


def confidence(agreed, disagreed, products, number, found):
    """Between what the variance lies, 95 % confidence; it is itself within, where it has not arrived yet."""
    if products is None or disagreed <= 0.0 or number <= 1.0:
        return None
    ratio = agreed / disagreed
    residual = max(products[0] - 2.0 * ratio * products[1] + ratio**2 * products[2], 0.0)
    width = 1.959964 * math.sqrt(residual / (number - 1.0)) / disagreed
    high = ratio * math.exp(width / ratio) if ratio > width else max(ratio + (math.e - 1.0) * width, 0.0)
    return min(max(ratio - width, 0.0), found), max(high, found)


def run_self_fl_auto(
    problem,
    *,
    num_local_steps,
    first_momentum,
    last_momentum,
    recent,
    learning,
    first,
    skipped,
    change,
    least,
    per_whole,
    prior_decided,
    factor_step,
    least_score_factor,
    most_frequency_weight,
    least_disagreement,
    least_skew,
    closing_passes,
    least_visits,
    closing_rounds,
    closing_splits,
    most_closing_change,
):
    """D17. A client keeps θ_m, the models of both halves of its rows and the θ they were made with: all move by 1 − k_m
    of the way from there to the new θ."""
    shared = prior = problem["start"]  # w, θ
    groups, stop = [], 0  # the places of each group's parameters
    for count in problem.get("groups") or [len(prior)]:
        groups.append(range(stop, stop + count))
        stop += count
    inter, of_group = 1.0 / first, [1.0 / first] * len(groups)  # the variance of all parameters, and of each group's
    prior_rows, memory = None, {}
    # Running means by group, each round's over the disagreement of the one before.
    agreed, disagreed, unit = [0.0] * len(groups), [0.0] * len(groups), None
    products, reporting = None, None  # a², ab and b² of a client, a and b being both in all; of how many clients
    own_steps = max(num_local_steps // per_whole, 1)
    half_steps = max((num_local_steps - 2 - own_steps) // 2, 1)
    history, steps, gradients = [], [], []
    # Rows of each class; and of each class where its score's bias lies, and which way it acts.
    classes, bias = problem.get("classes"), problem.get("bias", [])
    head = problem.get("scorers", ())
    frequencies, alike = [1.0 / len(bias)] * len(bias) if bias else [], 0.0
    # By how much scores and class frequencies are too small; running means of the curvature and of what it pulls to.
    factors, curvature, pull = [1.0, 1.0], [[0.0, 0.0], [0.0, 0.0]], [0.0, 0.0]

    def dot(a, b):
        return math.fsum(x * y for x, y in zip(a, b, strict=True))

    def dots(a, b):
        """By group."""
        return [math.fsum(a[i] * b[i] for i in places) for places in groups]

    def total(several):
        """Of lists by group, group by group."""
        return [math.fsum(part) for part in zip(*several, strict=True)]

    def of_each(reports):
        """The mean of numbers, or of lists of them."""
        if isinstance(reports[0], list):
            return [math.fsum(part) / len(reports) for part in zip(*reports, strict=True)]
        return math.fsum(reports) / len(reports)

    def less(a, b):
        return [x - y for x, y in zip(a, b, strict=True)]

    def here(m, which):
        """One of its three models, as θ is now, scores being as many times too small as at its last visit."""
        return moved_on(m, which, scaled(prior, memory[m]["factors"][0])) if m in memory else prior

    def moved_on(m, which, centre):
        """One of its three models, now that the centre of its prior has come here."""
        if m not in memory:
            return centre
        found, lean = memory[m]["models"][which], memory[m]["lean"]
        old = scaled(memory[m]["prior"], memory[m]["factors"][0])
        return [x + lean * (now - then) for x, now, then in zip(found, centre, old, strict=True)]

    def scaled(model, times):
        """With scores so many times as large."""
        return [x * times if place in head else x for place, x in enumerate(model)]

    def skew():
        """ρ, the variance of class frequencies between clients over π(1 − π)."""
        chance = math.fsum(f * f for f in frequencies)
        return min(max((alike - chance) / (1.0 - chance), least_skew), 0.99) if bias else 0.0

    def shift(counts, rho):
        """How much likelier each class is for one with these rows than for everybody, in logarithms."""
        if rho == 0.0:
            return [0.0] * len(bias)
        worth, count = (1.0 - rho) / rho, math.fsum(counts)
        own = [(n + worth * f) / (count + worth) for n, f in zip(counts, frequencies, strict=True)]
        return [math.log(x) - math.log(f) for x, f in zip(own, frequencies, strict=True)]

    def own_shift(m, rho, factor):
        """As much of it as counts: a."""
        return [factor * x for x in shift(classes[m], rho)] if bias else []

    def rows_of_classes(m):
        """Of all its rows, and of either half."""
        return [classes[m], *problem["half_classes"](m)] if bias else [[], [], []]

    def row_shift(counts):
        """What scores have on top while these rows train: as often as classes come among them; none that they lack."""
        if not math.fsum(counts):
            return [0.0] * len(bias)
        shares = [n / math.fsum(counts) for n in counts]
        return [math.log(x / f) if x else -30.0 for x, f in zip(shares, frequencies, strict=True)]

    def arrived(m, rho):
        """Its three models and their centres, as they are while they train, by what is known of classes by now."""
        before = memory.get(m, {"lean": 1.0, "rho": 0.0, "factors": [1.0, 1.0]})
        now, then = own_shift(m, rho, factors[1]), own_shift(m, before["rho"], before["factors"][1])
        centre, shifts = scaled(prior, factors[0]), [row_shift(counts) for counts in rows_of_classes(m)]
        known = [added(moved_on(m, which, centre), less(now, then), before["lean"]) for which in ("whole", 0, 1)]
        centres = [added(centre, more) for more in shifts]
        return centres, [added(model, less(more, now)) for model, more in zip(known, shifts, strict=True)]

    def as_predicting(m, rho, models):
        """What a client keeps: its three models as they predict."""
        now = own_shift(m, rho, factors[1])
        shifts = [row_shift(counts) for counts in rows_of_classes(m)]
        return [added(model, less(now, more)) for model, more in zip(models, shifts, strict=True)]

    def factor_report(t, m, rho):
        """Slope and curvature of minus the log-likelihood of t and a, on rows of either half: row by row.

        The scores are those of θ; the class frequencies are the other half's.
        """
        slope, bend = [0.0, 0.0], [[0.0, 0.0], [0.0, 0.0]]
        for half in (0, 1):
            if not problem["half_terms"][m][half]:
                continue
            more = shift(problem["half_classes"](m)[1 - half], rho)
            for scores, answer in problem["scores"](t, m, half)(prior):
                odds = [math.exp(factors[0] * z + factors[1] * s) for z, s in zip(scores, more, strict=True)]
                chances = [x / math.fsum(odds) for x in odds]
                inputs = (scores, more)
                means = [dot(chances, values) for values in inputs]
                for i in (0, 1):
                    slope[i] += means[i] - inputs[i][answer]
                    for j in (0, 1):
                        both = [x * y for x, y in zip(inputs[i], inputs[j], strict=True)]
                        bend[i][j] += dot(chances, both) - means[i] * means[j]
        return slope, bend

    def added(model, more, times=1.0):
        model = list(model)
        for (place, sign), x in zip(bias, more, strict=True):
            model[place] += times * sign * x
        return model

    def looked_at(t, m, split, centres, halves, slopes, precision):
        """What both halves' models say: how far they are from their centres, what they agree on, what they disagree on
        twice, both by group, what they leave undecided, and the temperature."""
        terms = problem["half_terms"][m]
        warmth = problem["temperature"](t, m, halves, 0, split) if "temperature" in problem else 1.0
        one, two = (less(half, middle) for half, middle in zip(halves, centres, strict=True))
        # On rows of either half both deviations are from the centre of that half.
        bends = [
            less(*(slope([x + d for x, d in zip(middle, own, strict=True)], 0, short=True) for own in (one, two)))
            for middle, slope in zip(centres, slopes, strict=True)
        ]
        seen = zip(dots(one, bends[1]), dots(two, bends[0]), strict=True)
        disagreement = [(terms[0] * x - terms[1] * y) / 2 for x, y in seen]
        apart = less(one, two)
        both = zip(dots(apart, bends[0]), dots(apart, bends[1]), strict=True)
        squares = [terms[0] * terms[1] / math.fsum(terms) * (x + y) / 2 for x, y in both]
        held_apart = dot([c * x for c, x in zip(precision, apart, strict=True)], apart)
        left = terms[0] * terms[1] / math.fsum(terms) ** 2 * held_apart
        return [(x + y) / 2 for x, y in zip(one, two, strict=True)], dots(one, two), disagreement, squares, left, warmth

    def variances_of(one, groups_before, agreed, disagreed, nats, clients, most):
        """The variance of all parameters, and of each group's, after what halves of an average client say."""
        found = math.fsum(agreed) / math.fsum(disagreed)
        after = changed(one, found, most)
        one = max(after, one) if nats * math.fsum(disagreed) < least else after
        several = []
        for before, a, b in zip(groups_before, agreed, disagreed, strict=True):
            own = changed(before, a / b if b else math.inf, most)
            # On the logarithm, as if as many more parameters, decided before, varied by the one variance.
            weight = clients * max(nats * b, 0.0)
            several.append(
                math.exp((weight * math.log(own) + prior_decided * math.log(one)) / (weight + prior_decided))
            )
        return one, several

    for t, cohort in enumerate(problem["cohorts"]):
        trained, deviations, agreements, disagreements, undecided, temperatures, spent = [], [], [], [], [], [], []
        squared = []  # the squared form of what halves disagree on
        reports = []  # of t and a
        rho, newness = skew(), (recent + 1.0) / (t + 1.0 + recent)  # by how much this round counts among all so far
        momentum = newness * first_momentum + (1.0 - newness) * last_momentum
        precision = [1.0 / variance for places, variance in zip(groups, of_group, strict=True) for _ in places]
        for m in cohort:
            gradient, rate = problem["gradient"](t, m), problem["rates"][m]
            trained.append(descend(shared, gradient, rate, num_local_steps))
            (centre, *centres), (old, *starts) = arrived(m, rho)
            if bias:
                reports.append(factor_report(t, m, rho))
            slopes, parts = problem["half_gradient"](t, m), problem["half_terms"][m]
            held = [c / problem["terms"][m] for c in precision]
            halves = [
                held_descent(start, middle, slope, rate, held, half_steps, momentum, skipped)
                for start, middle, slope in zip(starts, centres, slopes, strict=True)
            ]
            mean, earlier = mean_model(halves, parts), mean_model(starts, parts)
            start = [x + y - z for x, y, z in zip(old, mean, earlier, strict=True)]
            own = held_descent(start, centre, gradient, rate * newness, held, own_steps, 0.0, skipped)
            terms, count = problem["half_terms"][m], problem["examples"][m]
            lean = 1.0 if prior_rows is None else prior_rows / (count + prior_rows)
            spent.append(num_local_steps + 2 * half_steps + own_steps + 2)
            if terms[1] > 0:
                seen = looked_at(t, m, 0, centres, halves, slopes, precision)
                for several, own_report in zip(
                    (deviations, agreements, disagreements, squared, undecided, temperatures), seen, strict=True
                ):
                    several.append(own_report)
            kept = {"prior": prior, "lean": lean, "rho": rho, "factors": factors}
            memory[m] = kept | {
                "models": dict(zip(("whole", 0, 1), as_predicting(m, rho, [own, *halves]), strict=True))
            }
        size = len(deviations)
        found_apart, least_apart = total(disagreements), [least_disagreement * x for x in total(squared)]
        if math.fsum(found_apart) < math.fsum(least_apart):
            found_apart = least_apart
        gone = math.fsum(found_apart)
        if size and (unit or gone > 0.0):
            pairs = [dots(a, b) for i, a in enumerate(deviations) for j, b in enumerate(deviations) if i != j]
            common = [number / len(pairs) for number in total(pairs)] if pairs else [0.0] * len(groups)
            seen = [number / size - both for number, both in zip(total(agreements), common, strict=True)]
            unit = unit or gone / size
            own = [
                ((math.fsum(a) - math.fsum(common)) / unit, math.fsum(b) / unit)
                for a, b in zip(agreements, disagreements, strict=True)
            ]
            new = [math.fsum(part) / size for part in zip(*((a * a, a * b, b * b) for a, b in own), strict=True)]
            products = blend(products or new, new, newness)
            everybody = len(problem["examples"])
            reporting = min(size / newness, everybody, everybody * size / len(cohort))
            agreed = blend(agreed, [number / unit for number in seen], newness)
            disagreed = blend(disagreed, [number / size / unit for number in found_apart], newness)
            if math.fsum(disagreed) > 0.0:
                # What an average client decides of each group, in nats, and how many clients the means are of.
                nats = unit / (math.fsum(temperatures) / size)
                clients = min(size / newness, len(problem["examples"]))
                inter, of_group = variances_of(inter, of_group, agreed, disagreed, nats, clients, change)
            unit = min(max(gone / size, unit / change**2), unit * change**2)
        counts = [problem["examples"][m] for m in cohort]
        # A client weighs itself, by the n_0 that it was sent.
        weights = [count if prior_rows is None else count / (count + prior_rows) for count in counts]
        worth = None
        if size and gone > 0.0:
            left = math.fsum(undecided)
            share = (left + gone) / math.fsum(temperatures) / len(prior)
            odds = max(1.0 / share - 1.0, left / gone)
            worth = math.fsum(counts) / len(cohort) * max(odds, 1e-6)
        prior_rows = moved(prior_rows, worth, learning)
        shared = mean_model(trained, weights)
        if bias:
            seen = mean_model([[n / math.fsum(classes[m]) for n in classes[m]] for m in cohort], weights)
            frequencies = blend(frequencies, seen, 1.0 / (t + 2.0))
            several = [classes[m] for m in cohort if math.fsum(classes[m]) > 1.0]
            pairs = [sum(n * (n - 1) for n in own) / (sum(own) * (sum(own) - 1)) for own in several]
            if pairs:
                alike += (math.fsum(pairs) / len(pairs) - alike) / (t + 1.0)
            bend = [[math.fsum(own[i][j] for _, own in reports) for j in (0, 1)] for i in (0, 1)]
            slope = [math.fsum(own[i] for own, _ in reports) for i in (0, 1)]
            curvature = [blend(old, new, newness) for old, new in zip(curvature, bend, strict=True)]
            pull = blend(pull, [dot(row, factors) - x for row, x in zip(bend, slope, strict=True)], newness)
            # A mean over rounds, times how many rounds it is a mean of: as many rows as count.
            counted = [[x / newness for x in row] for row in curvature]
            limits = factor_step, least_score_factor, most_frequency_weight
            factors = most_likely_factors(factors, counted, [x / newness for x in pull], *limits)
        prior = blend(prior, shared, newness)
        history.append(prior)
        steps.append([num_local_steps] * len(cohort))
        gradients.append(spent)
    num_clients = len(problem["examples"])
    result = outcome(
        prior,
        [here(m, "whole") for m in range(num_clients)],
        history,
        steps,
        gradients,
    )
    # Training is over: each client that took part goes on by itself, on all rows, with θ and all else as they are.
    rho, newness = skew(), (recent + 1.0) / (len(problem["cohorts"]) + 1.0 + recent)
    momentum = newness * first_momentum + (1.0 - newness) * last_momentum
    precision = [1.0 / variance for places, variance in zip(groups, of_group, strict=True) for _ in places]
    closing, known_rows = problem.get("closing"), prior_rows
    trained_inter, trained_groups = inter, of_group
    trained_interval = confidence(math.fsum(agreed), math.fsum(disagreed), products, reporting, inter)

    def closing_steps(count):
        """As many as pass over so many rows often enough."""
        a_pass, visits = (1 if problem["batch_size"] is None else math.ceil(count / problem["batch_size"])), 1
        while visits * num_local_steps < closing_passes * a_pass:
            visits *= 2
        return max(min(visits, len(problem["cohorts"])), least_visits) * num_local_steps

    # Before that all clients cut their rows anew, train both halves from the prior means, and say how far they differ.
    several, (prior_inter, prior_groups) = [], (inter, of_group)
    for number in range(1, 1 + (0 if closing is None else closing_rounds)):
        t, held_by = (
            closing + number - 1,
            [1.0 / v for places, v in zip(groups, prior_groups, strict=True) for _ in places],
        )
        reports = []
        for m, count in enumerate(problem["examples"]):
            if not problem["half_terms"][m][1]:
                continue
            looks = []
            for split in range((number - 1) * closing_splits + 1, number * closing_splits + 1):
                slopes = problem["half_gradient"](t, m, split)
                counts = problem["half_classes"](m, split) if bias else [[], []]
                centres = [added(scaled(prior, factors[0]), row_shift(own) if bias else []) for own in counts]
                halves = []
                for middle, slope, rows in zip(centres, slopes, ((int(count) + 1) // 2, int(count) // 2), strict=True):
                    held = [c / problem["terms"][m] for c in held_by]
                    rate, steps_here = problem["rates"][m], closing_steps(rows)
                    halves.append(held_descent(middle, middle, slope, rate, held, steps_here, momentum, skipped))
                looks.append(looked_at(t, m, split, centres, halves, slopes, held_by))
            reports.append([of_each(own) for own in zip(*looks, strict=True)])
        size = len(reports)
        if not size:
            continue
        deviations, agreements, disagreements, squared, undecided, temperatures = zip(*reports, strict=True)
        pairs = [dots(a, b) for i, a in enumerate(deviations) for j, b in enumerate(deviations) if i != j]
        common = [x / len(pairs) for x in total(pairs)] if pairs else [0.0] * len(groups)
        found_apart, least_apart = total(disagreements), [least_disagreement * x for x in total(squared)]
        if math.fsum(found_apart) < math.fsum(least_apart):
            found_apart = least_apart
        own = [(math.fsum(a) - math.fsum(common), math.fsum(b)) for a, b in zip(agreements, disagreements, strict=True)]
        new = [math.fsum(part) / size for part in zip(*((a * a, a * b, b * b) for a, b in own), strict=True)]
        beyond = [x / size - both for x, both in zip(total(agreements), common, strict=True)]
        several.append((beyond, [x / size for x in found_apart], new))
        agreed_here, disagreed_here, new = (
            [math.fsum(x) / len(several) for x in zip(*part, strict=True)] for part in zip(*several, strict=True)
        )
        everybody = len(problem["examples"])
        if math.fsum(disagreed_here) <= 0.0:
            several.pop()
            continue
        nats, clients = 1.0 / (math.fsum(temperatures) / size), min(size * len(several), everybody)
        inter, of_group = variances_of(inter, of_group, agreed_here, disagreed_here, nats, clients, most_closing_change)
        with_common = [x + y for x, y in zip(agreed_here, common, strict=True)]
        prior_inter, prior_groups = variances_of(
            prior_inter, prior_groups, with_common, disagreed_here, nats, clients, most_closing_change
        )
        left, gone = math.fsum(undecided), math.fsum(found_apart)
        share = (left + gone) / math.fsum(temperatures) / len(prior)
        worth = math.fsum(problem["examples"]) / everybody * max(max(1.0 / share - 1.0, left / gone), 1e-6)
        last_rows = worth if gone > 0.0 else None
        agreed, disagreed, products, reporting = agreed_here, disagreed_here, new, min(clients, size)
        known_rows = last_rows if last_rows is not None else known_rows
        # The centre goes as far along the mean of all deviations as clients have in common of it.
        middle = [x / size for x in total(deviations)]
        shares = [
            min(max(both / (whole or 1.0), 0.0), 1.0) for both, whole in zip(common, dots(middle, middle), strict=True)
        ]
        prior = list(prior)
        for share, places in zip(shares, groups, strict=True):
            for place in places:
                prior[place] += share * middle[place]
    precision = [1.0 / variance for places, variance in zip(groups, prior_groups, strict=True) for _ in places]
    for m in memory if closing is not None else ():
        (centre, *_), (own, *halves) = arrived(m, rho)
        gradient, rate, count = problem["gradient"](closing, m), problem["rates"][m], problem["examples"][m]
        held = [c / problem["terms"][m] for c in precision]
        own = held_descent(own, centre, gradient, rate, held, closing_steps(count), momentum, skipped)
        lean = 1.0 if prior_rows is None else prior_rows / (count + prior_rows)
        kept = {"prior": prior, "lean": lean, "rho": rho, "factors": factors}
        memory[m] = kept | {"models": dict(zip(("whole", 0, 1), as_predicting(m, rho, [own, *halves]), strict=True))}
    return result | {
        "closed": [here(m, "whole") for m in range(num_clients)],
        "of_closing": prior_groups,
        "trained_inter_variance": trained_inter,
        "trained_of_group": trained_groups,
        "trained_interval": trained_interval,
        "trained_prior_rows": prior_rows,
        "factors": factors,
        "inter_variance": inter,
        "interval": confidence(math.fsum(agreed), math.fsum(disagreed), products, reporting, inter),
        "of_group": of_group,
        "prior_rows": known_rows,
        "frequencies": frequencies,
        "skew": skew(),
    }
