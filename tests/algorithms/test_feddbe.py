"""FedDBE's own vector: what a client answers, what travels, and what it refuses."""

import pytest
import torch
from torch import nn

import selffl
from selffl.errors import ConfigError


def federation(values=False):
    generator = torch.Generator().manual_seed(0)
    client, labels = torch.arange(60) % 3, torch.randint(3, (60,), generator=generator)
    features = torch.randn(60, 4, generator=generator) + labels.unsqueeze(-1) + client.unsqueeze(-1)
    return selffl.Federation.from_arrays(features, features.sum(1) if values else labels, client, 0.2)


def network(outputs=3):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs))


@pytest.mark.parametrize("values", [False, True])
def test_a_personal_model_is_a_module_of_its_own_kind_whose_head_sees_shifted_features(values):
    """For classes and for values: nothing in it is about classes."""
    fed = federation(values)
    method = selffl.algorithm("feddbe", penalty=1.0, num_local_steps=10)
    run = selffl.train(network(1 if values else 3), fed, method, rounds=5, participation=1.0, learning_rate=0.05)
    shared = run.global_model()
    for number, own in enumerate(fed.clients):
        model, shift = run.personal_model(own), run._state.memory.shift[number]
        assert type(model) is nn.Sequential
        with torch.no_grad():
            seen = shared[:2](fed.train.features)
            torch.testing.assert_close(model(fed.train.features), shared[2](seen + shift[:5]))
        assert shift[:5].norm() > 1e-3
        assert shift[5:].abs().max() == 0.0


def test_mean_features_travel_in_the_first_round_alone_and_shifts_never():
    fed, sent = federation(), []
    run = selffl.train(network(), fed, "feddbe", rounds=1, participation=1.0)
    engine = run._session.engine
    engine.advance(engine.start(run._session.model.params), 3, lambda report: sent.append(report.upload))
    assert [bool(upload.features.abs().max() > 0) for upload in sent] == [True, False, False]
    assert {tuple(upload.features.shape) for upload in sent} == {(5,)}


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (
            nn.Linear(4, 3),
            r"^feddbe shifts the features of a body that is trained, and the model has 1 layer; expected",
        ),
        (nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3, bias=False)), "and the model has a last layer without a bias"),
        (
            nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)),
            r"^feddbe needs the input of the last layer, .* \(1\) is not",
        ),
        (nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3), nn.Softmax(1)), "outputs of Sequential are not those of its"),
    ],
)
def test_a_model_that_it_cannot_train_is_refused_in_a_line(module, said):
    with pytest.raises(ConfigError, match=said) as error:
        selffl.train(module, federation(), "feddbe", rounds=2)
    assert "\n" not in str(error.value)
