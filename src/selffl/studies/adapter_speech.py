"""Clips of Speech Commands by speaker, for the speaker encoder that comes inside the package Resemblyzer.

Wan, Wang, Papir and Lopez Moreno, Generalized End-to-End Loss for Speaker Verification (ICASSP 2018), is how it was
trained: an LSTM of three layers, and a linear layer behind its last hidden state.  Nothing of the package is imported:
its weights are read, and the spectrograms that it was trained on are computed here.  They are those of the package (its
own function by librosa differs by rounding alone), but for silence, which is not cut out of clips of a second.

The LSTM stays frozen.  Its hidden state is therefore a clip's row, computed once; what clients adapt is the linear
layer, and a new head behind it names the word.
"""

from __future__ import annotations

import importlib.metadata
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from selffl.data.audio import RATE_HZ, load_clips
from selffl.data.locate import read_checked
from selffl.errors import ConfigError, DataError
from selffl.randomness import draw_network
from selffl.studies.adapter_rows import HEAD, Benchmark, Rows, of_some_clients

PACKAGE, WEIGHTS = "Resemblyzer", "resemblyzer/pretrained.pt"
SHA256 = "39373b86598fa3da9fcddee6142382efe09777e8d37dc9c0561f41f0070f134e"
WINDOW_SAMPLES, HOP_SAMPLES, NUM_BANDS = 400, 160, 40  # 25 ms and 10 ms
WIDTH, NUM_LAYERS = 256, 3  # of the LSTM
QUIETEST = 10 ** (-30 / 20)  # root mean square that quieter clips are brought to: 30 dB below full scale
MIN_CLIPS = 8  # of a speaker
NUM_SMALL = 20  # speakers of a quick look
LINEAR_HZ = 1000.0  # up to which Slaney's mel scale is linear
BREAK_MEL, LOG_STEP = 15.0, float(np.log(6.4) / 27.0)  # where that is, and how far a mel goes above it


def weights_file() -> Path:
    """Where the package that is installed has its weights."""
    try:
        path = Path(str(importlib.metadata.distribution(PACKAGE).locate_file(WEIGHTS)))
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            "Resemblyzer is not installed; expected it for the weights of its speaker encoder. Install it without what "
            "its own code needs: pip install --no-deps resemblyzer."
        ) from None
    if not path.is_file():
        raise ConfigError(f"{path} was not found; expected Resemblyzer's weights. Install the package again.")
    return path


def read_weights(path: Path) -> dict[str, Tensor]:
    """What the package has trained, once the checksum is right."""
    read_checked(path, SHA256, "Resemblyzer's weights")
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    found: dict[str, Tensor] = content["model_state"]
    return found


def mel_frequencies(mels: Tensor) -> Tensor:
    """Frequencies in Hz of mels as Slaney's Auditory Toolbox counts them: linear to 1 kHz, logarithmic above."""
    linear = mels * LINEAR_HZ / BREAK_MEL
    return torch.where(mels < BREAK_MEL, linear, LINEAR_HZ * torch.exp(LOG_STEP * (mels - BREAK_MEL)))


@lru_cache(maxsize=1)
def filter_bank() -> Tensor:
    """How much each band takes of each frequency of the transform, ``[201, 40]``: triangles of area 1 in Hz."""
    highest = BREAK_MEL + float(np.log(RATE_HZ / 2 / LINEAR_HZ)) / LOG_STEP
    feet = mel_frequencies(torch.linspace(0.0, highest, NUM_BANDS + 2, dtype=torch.float64))
    frequency = torch.linspace(0.0, RATE_HZ / 2, WINDOW_SAMPLES // 2 + 1, dtype=torch.float64)[:, None]
    low, peak, high = feet[:-2], feet[1:-1], feet[2:]
    sides = torch.minimum((frequency - low) / (peak - low), (high - frequency) / (high - peak))
    return sides.clamp(min=0) * 2 / (high - low)


def spectrogram(sound: Tensor) -> Tensor:
    """Power in each band and frame, ``[rows, 1 + samples // 160, 40]``, of samples in [-1, 1] ``[rows, samples]``."""
    window = torch.hann_window(WINDOW_SAMPLES, dtype=sound.dtype)
    transform = torch.stft(sound, WINDOW_SAMPLES, HOP_SAMPLES, window=window, pad_mode="constant", return_complex=True)
    return transform.abs().square().transpose(1, 2) @ filter_bank().to(sound)


def louder(sound: Tensor) -> Tensor:
    """Clips, of which quiet ones are brought to 30 dB below full scale."""
    loudness = sound.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-9)
    return sound * (QUIETEST / loudness).clamp(min=1.0)


@lru_cache(maxsize=1)
def encode_clips() -> Rows:
    """Every clip of a speaker with enough of them: its hidden state, its word, its speaker."""
    index, clips = load_clips()
    named = (index.source == "speech_commands_v0.02_test") & (index.speaker != "")
    _, owner, count = np.unique(index.speaker[named], return_inverse=True, return_counts=True)
    chosen = np.flatnonzero(named)[count[owner] >= MIN_CLIPS]
    if not len(chosen):
        raise DataError(f"no speaker has {MIN_CLIPS} clips; expected those of Speech Commands. Copy them again.")
    sound = np.stack([clips.samples[clips.start[row] :][: clips.length[row]] for row in chosen])
    _, labels = np.unique(index.label[chosen], return_inverse=True)
    weights = read_weights(weights_file())
    lstm = nn.LSTM(NUM_BANDS, WIDTH, NUM_LAYERS, batch_first=True)
    lstm.load_state_dict({name.removeprefix("lstm."): part for name, part in weights.items() if "lstm." in name})
    with torch.no_grad():
        mels = spectrogram(louder(torch.from_numpy(sound).to(torch.float32) / 2**15))
        states = torch.cat([lstm(part)[1][0][-1] for part in torch.split(mels, 128)])
    return Rows(states.numpy(), labels.astype(np.int64), index.speaker[chosen])


class WordNetwork(nn.Sequential):
    """The encoder's linear layer, and a new head for words behind it."""

    def __init__(self, num_words: int, width: int = WIDTH) -> None:
        super().__init__()
        self.add_module("linear", nn.Linear(width, width))
        self.add_module("relu", nn.ReLU())
        self.add_module(HEAD, nn.Linear(width, num_words))


@lru_cache(maxsize=1)
def network(is_small: bool = False) -> nn.Module:
    """What clients adapt: the linear layer as it was trained for speakers, and a head drawn anew."""
    del is_small
    found = draw_network(lambda: WordNetwork(int(encode_clips().labels.max()) + 1))
    weights = read_weights(weights_file())
    found.get_submodule("linear").load_state_dict({name: weights[f"linear.{name}"] for name in ("weight", "bias")})
    return found.requires_grad_(False)


def rows(seed: int, is_small: bool = False) -> Rows:
    """The rows for all seeds, which split them; of twenty speakers for a quick look."""
    del seed
    return of_some_clients(encode_clips(), NUM_SMALL) if is_small else encode_clips()


SPEECH = Benchmark(rows, network)
