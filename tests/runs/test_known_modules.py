"""Modules that others have written train as cohorts: ResNet, MobileNet, ViT, and Hugging Face's from a config.

Each is compared with a plain loop of torch on the same minibatches.  torchvision and transformers are no dependencies:
``pip install 'selffl[known-modules]'``.
"""

import contextlib
import copy
import importlib

import pytest
import torch
from torch import nn

import selffl

STEPS, RATE, CLIENTS = 2, 0.001, 3
OPERATORS = torch.library.Library("torchvision", "FRAGMENT")  # none of them, unless they are missed
REASON = "not installed: pip install 'selffl[known-modules]'"


def torchvision_models():
    """torchvision's models, which are Python alone.

    A torchvision that was built for CUDA cannot load its operators beside a torch without it, and then misses two.
    """
    try:
        return pytest.importorskip("torchvision.models", reason=f"torchvision is {REASON}")
    except RuntimeError:
        for name in ("nms", "qnms"):
            OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return importlib.import_module("torchvision.models")


@pytest.fixture(scope="module")
def vision():
    return torchvision_models()


@pytest.fixture(scope="module")
def hugging_face():
    with contextlib.suppress(pytest.skip.Exception):
        torchvision_models()  # which it imports, where it is there
    return pytest.importorskip("transformers", reason=f"transformers is {REASON}")


class Logits(nn.Module):
    """The logits of a Hugging Face classifier, of rows of words."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, words):
        return self.module(words).logits


def resnet(vision):
    return vision.resnet18(num_classes=3)


def mobilenet(vision):
    return vision.mobilenet_v2(num_classes=3, width_mult=0.25, dropout=0.0)


def small_vit(vision):
    return vision.VisionTransformer(32, 8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=3)


WORDS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "num_labels": 3}


def bare_bert(transformers):
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(vocab_size=30, max_position_embeddings=16, **WORDS, **still)
    return transformers.BertForSequenceClassification(config)


def bert(transformers):
    return Logits(bare_bert(transformers))


def llama(transformers):
    config = transformers.LlamaConfig(vocab_size=30, max_position_embeddings=16, pad_token_id=0, **WORDS)
    return Logits(transformers.LlamaForSequenceClassification(config))


def gpt2(transformers):
    """With its weights tied, as language models have them: of words in, and of scores of words out."""
    config = transformers.GPT2Config(
        vocab_size=30, n_positions=16, n_embd=16, n_layer=2, n_head=2, num_labels=3, pad_token_id=None,
        bos_token_id=None, eos_token_id=None,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return LastWord(transformers.GPT2LMHeadModel(config))


class LastWord(Logits):
    """The scores of the first three words after a row."""

    def forward(self, words):
        return super().forward(words)[:, -1, :3]


def pictures():
    drawn = torch.Generator().manual_seed(0)
    return torch.randn(30, 3, 32, 32, generator=drawn, dtype=torch.float64)


def sentences():
    return torch.randint(1, 30, (30, 6), generator=torch.Generator().manual_seed(0))


def scores(module, x):
    """What a module says of rows: as it is called by hand."""
    return module(x) if isinstance(x, torch.Tensor) else module(**x).logits


def plain_rounds(module, run, num_rounds):
    """FedAvg as anybody would write it: each client in turn, all entries of the state_dicts averaged."""
    weights = run.federation.train.num_examples.tolist()
    for number in range(1, num_rounds + 1):
        trained = []
        for client in range(CLIENTS):
            own = copy.deepcopy(module).train()
            optimiser = torch.optim.SGD(own.parameters(), lr=RATE)
            task = run._session.source.task(torch.tensor([client]), number)
            for draw in range(STEPS):
                x, y = (part[0] for part in task.batch(draw, torch.tensor([0])))
                optimiser.zero_grad()
                nn.functional.cross_entropy(scores(own, x), y).backward()
                optimiser.step()
            trained.append(own.state_dict())
        state = module.state_dict()
        for name, entry in state.items():
            if entry.is_floating_point():
                entry.copy_(
                    sum(w * each[name].double() for w, each in zip(weights, trained, strict=True)) / sum(weights)
                )
    return module.eval()


def check(make, given, features, gradients, num_rounds=1):
    torch.manual_seed(0)
    module = make(given)
    client = torch.tensor([0, 1, 2, 2, 1, 2] * 5)
    fed = selffl.Federation.from_arrays(features, torch.arange(30) % 3, client.numpy(), seed=0)
    method = selffl.algorithm("fedavg", num_local_steps=STEPS)
    run = selffl.train(
        module, fed, method, rounds=num_rounds, participation=1.0, learning_rate=RATE, batch_size=4,
        gradients=gradients, dtype="float64",
    )  # fmt: skip
    expected = plain_rounds(copy.deepcopy(module).double(), run, num_rounds)
    found = run.global_model()
    for name, entry in expected.state_dict().items():
        if entry.is_floating_point():
            torch.testing.assert_close(
                found.state_dict()[name], entry, rtol=1e-7, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}"
            )
    with torch.no_grad():
        ours, theirs = (scores(each, fed.test.features) for each in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    right = int((theirs.argmax(1) == fed.test.labels).sum())
    assert run.summary["global_accuracy"] == pytest.approx(right / len(fed.test.labels))


@pytest.mark.slow
@pytest.mark.parametrize("gradients", ["vmap", "loop"])
@pytest.mark.parametrize("make", [resnet, mobilenet, small_vit])
def test_torchvisions_models_train_as_the_plain_loop_does(make, gradients, vision):
    check(make, vision, pictures(), gradients)


@pytest.mark.parametrize("gradients", ["vmap", "loop"])
@pytest.mark.parametrize("make", [bert, llama, gpt2])
def test_hugging_faces_models_train_as_the_plain_loop_does(make, gradients, hugging_face):
    check(make, hugging_face, sentences(), gradients)


def padded_sentences(is_square):
    """Sentences of two to six words, with masks for each word, or, of the same content, for each pair of words."""
    drawn = torch.Generator().manual_seed(1)
    is_word = torch.arange(6) < torch.randint(2, 7, (30, 1), generator=drawn)
    return {
        "input_ids": sentences() * is_word,
        "attention_mask": is_word[:, None, None, :].expand(-1, 1, 6, 6) if is_square else is_word.long(),
        "token_type_ids": torch.randint(0, 2, (30, 6), generator=drawn),
    }


@pytest.mark.parametrize(
    ("gradients", "is_square"), [("auto", False), ("loop", False), ("auto", True), ("vmap", True), ("loop", True)]
)
def test_hugging_faces_models_take_masks_by_name_and_return_a_record(gradients, is_square, hugging_face):
    check(bare_bert, hugging_face, padded_sentences(is_square), gradients)


def test_what_would_go_unseen_into_keywords_is_refused(hugging_face):
    x = padded_sentences(False) | {"idx": torch.arange(30)}
    fed = selffl.Federation.from_arrays(x, torch.arange(30) % 3, list("abc") * 10)
    with pytest.raises(selffl.ConfigError, match=r"^rows have an entry 'idx', and forward of Bert"):
        selffl.train(bare_bert(hugging_face), fed, rounds=1)
