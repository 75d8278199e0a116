"""Adapters of peft: folders that it reads, and modules that it has prepared."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import selffl
from selffl.adapters import from_peft, lora, save_peft
from selffl.errors import ConfigError
from selffl.training.blocks import gradient_of
from selffl.training.flat import FlatModel


class Net(nn.Module):
    """A layer of each kind that such a folder can hold."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(12, 6)
        self.mix = nn.Conv1d(6, 8, 3, padding=1)
        self.dense = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, rows):
        return self.head(torch.relu(self.dense(self.mix(self.table(rows).transpose(1, 2)).amax(-1))))


def adapted():
    torch.manual_seed(1)
    body = Net().eval()
    module = lora(body, 2, ["table", "mix", "dense"], alpha=5.0)
    with torch.no_grad():
        for part in module.parameters():
            if part.requires_grad:
                part += 0.3 * torch.randn_like(part)
    return body, module


def rows():
    return torch.randint(0, 12, (5, 7), generator=torch.Generator().manual_seed(2))


def test_a_folder_holds_what_peft_reads(tmp_path):
    """By hand, from the files alone: W + (alpha/r) B A, by peft's names and shapes."""
    body, module = adapted()
    folder = save_peft(module, tmp_path / "adapter", base="net-small")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, 5.0)
    assert config["target_modules"] == ["table", "mix", "dense"]
    assert config["modules_to_save"] == ["head"]
    assert config["base_model_name_or_path"] == "net-small"
    found = load_file(folder / "adapter_model.safetensors")
    scale, root = config["lora_alpha"] / config["r"], "base_model.model."
    plain = copy.deepcopy(body)
    with torch.no_grad():
        down, up = (found[f"{root}dense.lora_{each}.weight"] for each in "AB")
        plain.dense.weight += scale * up @ down
        down, up = (found[f"{root}mix.lora_{each}.weight"] for each in "AB")
        plain.mix.weight += scale * torch.einsum("or,rik->oik", up[..., 0], down)
        down, up = (found[f"{root}table.lora_embedding_{each}"] for each in "AB")
        plain.table.weight += scale * (up @ down).T
    plain.head.load_state_dict({kind: found[f"{root}head.{kind}"] for kind in ("weight", "bias")})
    torch.testing.assert_close(plain(rows()), module(rows()), rtol=1e-4, atol=1e-5)


def test_what_has_no_counterpart_is_refused(tmp_path):
    attending = lora(nn.Sequential(nn.TransformerEncoderLayer(8, 2, 8, 0.0), nn.Linear(8, 2)), 2)
    with pytest.raises(ConfigError, match="adapters within torch's attention, which peft writes otherwise"):
        save_peft(attending, tmp_path / "a")
    with pytest.raises(ConfigError, match="Linear has no adapters"):
        save_peft(nn.Linear(2, 2), tmp_path / "a")
    with pytest.raises(ConfigError, match="Linear has no parameters named lora_A; expected a module that peft has"):
        from_peft(nn.Linear(2, 2))
    assert not (tmp_path / "a").exists()


def test_peft_reads_the_folder(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install 'selffl[known-modules]'")
    body, module = adapted()
    back = peft.PeftModel.from_pretrained(copy.deepcopy(body), save_peft(module, tmp_path / "adapter")).eval()
    torch.testing.assert_close(back(rows()), module(rows()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("targets", "ways"), [(["dense", "mix"], ["vmap"]), (["dense"], ["vmap", "stacked"])]
)  # a convolution's B is one of its own
def test_a_module_of_peft_trains_as_a_cohort(targets, ways):
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install 'selffl[known-modules]'")
    body, _ = adapted()
    config = peft.LoraConfig(r=2, target_modules=targets, modules_to_save=["head"], lora_dropout=0.0)
    model = FlatModel(from_peft(peft.get_peft_model(copy.deepcopy(body), config)))
    assert not [layer.name for layer in model.layers if "lora_A" in layer.name]
    torch.manual_seed(3)
    params = model.params + 0.2 * torch.randn(4, len(model.params))
    given = torch.stack([rows().roll(client, 1) for client in range(4)])
    labels = torch.randint(0, 3, given.shape[:2])
    loop, *others = (
        gradient_of(model, nn.functional.cross_entropy, way)(params, given, labels) for way in ("loop", *ways)
    )
    for found in others:
        torch.testing.assert_close(found, loop, rtol=1e-4, atol=1e-6)
    fed = selffl.Federation.from_arrays(
        given.reshape(-1, 7).numpy(), labels.reshape(-1).numpy(), torch.arange(4).repeat_interleave(5).numpy()
    )
    run = selffl.train(from_peft(peft.get_peft_model(copy.deepcopy(body), config)), fed, rounds=2, participation=1.0)
    assert run.summary["status"] == "finished"
