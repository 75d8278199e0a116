"""What five made-up devices hear of a clip: room, bed of sound, frequency response, noise of the microphone.

A row is rendered in these steps, all linear but the last.  The clip is put at its place in a window of 1.5 s and
brought to its level; the bed, where there is one, is brought to its own and added; one of the device's rooms and its
frequency response are applied as one filter; noise of the room, through the same response, and noise of the microphone
are added; the gain is applied, and what exceeds full scale is clipped.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from selffl.data.audio import RATE_HZ, Clips
from selffl.data.spectrogram import codes

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

ROW_SAMPLES = 24_000  # of a row: 1.5 s
TAIL_SAMPLES = 6_000  # samples of reverberation that are kept
FOURIER_SAMPLES = ROW_SAMPLES + TAIL_SAMPLES  # of the Fourier transforms: a tail does not come round to the beginning
FADE_SAMPLES = 160  # samples, 10 ms, at both ends of a clip
LOUDNESS_SAMPLES = 8_000  # samples: a clip is as loud as its loudest half second
NUM_ROOMS = 8  # of each device: places where it may stand
MIN_BED_POWER = 1e-7  # mean power, −70 dB: a bed that is silent at this place stays so
OCTAVES_HZ = (63, 125, 250, 500, 1000, 2000, 4000, 8000)  # Hz, of the octaves of a frequency response
BATCH_ROWS = 64


@dataclass(frozen=True)
class Device:
    """A type of device."""

    title: str  # what it is like
    response: Sequence[float]  # gain in dB at `OCTAVES_HZ`; straight lines between them on a logarithmic scale
    reverberation: float  # seconds until an echo has fallen by 60 dB
    direct: float  # energy of the direct sound over that of its echoes, dB
    noise: float  # level of the microphone's noise, dB below full scale
    slope: float  # how the noise changes with frequency, dB per octave; 0 is white, −3 pink
    hum: float  # frequency in Hz whose multiples a fan or the mains add to the noise; 0 for none
    gain: float  # after everything, dB


_KNOWN = tomllib.loads(files("selffl.data").joinpath("devices.toml").read_text("utf-8"))
DEVICES = {name: Device(**known) for name, known in _KNOWN.items()}


@dataclass(frozen=True)
class Takes:
    """Rows to render, each from a clip; all arrays ``[rows]``, levels in dB below full scale."""

    clip: Integers
    place: Integers  # of the clip's first sample in the window; what lies outside is cut off
    level: Floats  # of the clip's loudest half second
    bed: Integers  # a clip, −1 for none
    bed_start: Integers  # of the window in the bed, which begins again where it ends
    bed_level: Floats  # over the window
    room: Integers  # 0 to 7
    room_noise: Floats

    def __len__(self) -> int:
        return len(self.clip)


def loudness(clips: Clips) -> Floats:
    """Mean power of each clip's loudest half second, relative to full scale."""
    loud = np.empty(len(clips.start))
    for number, (start, length) in enumerate(zip(clips.start, clips.length, strict=True)):
        power = (clips.samples[start : start + length] / 32768.0) ** 2
        total = np.concatenate([[0.0], np.cumsum(power)])
        span = min(LOUDNESS_SAMPLES, int(length))
        loud[number] = (total[span:] - total[:-span]).max() / span
    return loud


@cache
def _frequencies() -> Floats:
    return np.arange(FOURIER_SAMPLES // 2 + 1, dtype=np.float64) * (RATE_HZ / FOURIER_SAMPLES)


def response(device: Device) -> Floats:
    """Amplitude of the device's frequency response at the frequencies of the transform."""
    octaves = np.log2(np.maximum(_frequencies(), OCTAVES_HZ[0]))
    decibels: Floats = np.interp(octaves, np.log2(OCTAVES_HZ), device.response)
    amplitude: Floats = np.power(10.0, decibels / 20)
    return amplitude


def rooms(device: Device) -> Floats:
    """What a click becomes in each of the device's rooms: itself, then echoes that die away, ``[8, samples]``.

    Gaussian noise under an exponential, drawn once for each device whatever the seed: a room is part of the device.
    """
    rng = np.random.default_rng([ord(letter) for letter in device.title])
    time = np.arange(TAIL_SAMPLES) / RATE_HZ
    echoes = rng.standard_normal((NUM_ROOMS, TAIL_SAMPLES)) * 10 ** (-3 * time / device.reverberation)
    echoes[:, : RATE_HZ // 500] = 0  # nothing is nearer than 2 ms
    echoes *= np.sqrt(10 ** (-device.direct / 10) / (echoes**2).sum(1, keepdims=True))
    echoes[:, 0] = 1
    return echoes


def _power_of_noise(device: Device) -> tuple[Floats, Floats]:
    """How a room's noise of mean power 1 and the microphone's noise are spread over frequency, as it hears them."""
    frequency = np.maximum(_frequencies(), 20.0)
    pink = 1 / frequency
    own = (frequency / 1000) ** (device.slope / (10 * np.log10(2)))
    if device.hum:
        # Narrow peaks that fall off by 6 dB an octave, as strong together as the rest.
        multiple = np.arange(1, 21)
        lines = (np.exp(-(((frequency[:, None] - device.hum * multiple) / 6) ** 2)) / multiple**2).sum(1)
        own = own / own.mean() + lines / lines.mean()
    own, pink = own / own.mean(), pink / pink.mean()
    return pink * response(device) ** 2, own * 10 ** (device.noise / 10)


def mixture(clips: Clips, loud: Floats, takes: Takes) -> tuple[Floats, Floats]:
    """What there is to hear, before any device: the clips in their windows and the beds, ``[rows, samples]`` each."""
    window = np.arange(ROW_SAMPLES)
    start, length = clips.start[takes.clip, None], clips.length[takes.clip, None]
    within = window - takes.place[:, None]
    inside = (within >= 0) & (within < length)
    within = within.clip(0, length - 1)
    fade = np.minimum(np.minimum(within + 1, length - within) / FADE_SAMPLES, 1.0)
    gain = np.sqrt(10 ** (takes.level / 10) / loud[takes.clip].clip(1e-10)) / 32768.0
    sound = np.where(inside, clips.samples[start + within] * fade * gain[:, None], 0.0)
    beds = np.zeros_like(sound)
    has_bed = takes.bed >= 0
    if has_bed.any():
        bed = takes.bed[has_bed]
        within = (takes.bed_start[has_bed, None] + window) % clips.length[bed, None]
        raw = clips.samples[clips.start[bed, None] + within] / 32768.0
        power = (raw**2).mean(1).clip(MIN_BED_POWER)
        beds[has_bed] = raw * np.sqrt(10 ** (takes.bed_level[has_bed] / 10) / power)[:, None]
    return sound, beds


def heard(sound: Floats, device: Device, takes: Takes, rng: np.random.Generator) -> Tensor:
    """What the device's microphone gives for sounds of 1.5 s, ``[rows, samples]``, float64."""
    filters = np.fft.rfft(rooms(device), FOURIER_SAMPLES) * response(device)  # [8, frequencies]
    room_power, own_power = _power_of_noise(device)
    spread = np.sqrt((10 ** (takes.room_noise / 10))[:, None] * room_power + own_power)
    draws = rng.standard_normal((len(takes), 2, len(_frequencies())))
    # A spectrum of FOURIER_SAMPLES · power at every frequency is noise of mean power 1; two halves, real and imaginary.
    noise = (draws[:, 0] + 1j * draws[:, 1]) * (spread * np.sqrt(FOURIER_SAMPLES / 2))
    noise[:, [0, -1]] = 0
    spectrum = torch.fft.rfft(torch.from_numpy(sound), FOURIER_SAMPLES) * torch.from_numpy(filters[takes.room])
    whole = torch.fft.irfft(spectrum + torch.from_numpy(noise), FOURIER_SAMPLES)[:, :ROW_SAMPLES]
    amplified: Tensor = (whole * 10 ** (device.gain / 20)).clamp(-1.0, 1.0)
    return amplified


def render(clips: Clips, loud: Floats, takes: Takes, device: Device, rng: np.random.Generator) -> Tensor:
    """Spectrograms of the rows in bytes, ``[rows, 40, 76]``, the same however they are divided into batches."""
    pieces = [torch.empty((0, 40, 1 + ROW_SAMPLES // 320), dtype=torch.uint8)]
    for first in range(0, len(takes), BATCH_ROWS):
        some = Takes(**{name: values[first : first + BATCH_ROWS] for name, values in vars(takes).items()})
        sound, beds = mixture(clips, loud, some)
        pieces.append(codes(heard(sound + beds, device, some, rng)))
    return torch.cat(pieces)
