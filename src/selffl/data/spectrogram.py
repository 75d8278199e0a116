"""Log-mel spectrograms of sound, as bytes: 80 dB below full scale in 255 steps, in which rounding does not show."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from selffl.data.audio import RATE_HZ

WINDOW_SAMPLES = 512  # samples, 32 ms
HOP_SAMPLES = 320  # samples, 20 ms
NUM_BANDS = 40
LOWEST, HIGHEST = 60.0, 7600.0  # Hz
RANGE_DB = 80.0  # dB below full scale; what is quieter counts as silence


def mel(frequency: Tensor) -> Tensor:
    """Frequencies in Hz on the mel scale, ``2595 log10(1 + f / 700)`` (O'Shaughnessy 1987)."""
    return 2595 * torch.log10(1 + frequency / 700)


@cache
def filter_bank() -> Tensor:
    """How much each band takes of each frequency of the transform, ``[257, 40]``, float64.

    Triangles with a peak of 1; their feet are the peaks of their neighbours, evenly spaced on the mel scale, on which
    their sides are straight (as in HTK).
    """
    frequency = mel(torch.arange(WINDOW_SAMPLES // 2 + 1, dtype=torch.float64) * RATE_HZ / WINDOW_SAMPLES)[:, None]
    low, high = mel(torch.tensor([LOWEST, HIGHEST], dtype=torch.float64)).tolist()
    peak = torch.linspace(low, high, NUM_BANDS + 2, dtype=torch.float64)
    step = (high - low) / (NUM_BANDS + 1)
    bank: Tensor = (1 - (frequency - peak[1:-1]).abs() / step).clamp(min=0)
    return bank


def band_centres() -> Tensor:
    """Frequencies in Hz where the bands peak, ``[40]``."""
    low, high = mel(torch.tensor([LOWEST, HIGHEST], dtype=torch.float64)).tolist()
    return 700 * (torch.pow(10, torch.linspace(low, high, NUM_BANDS + 2, dtype=torch.float64)[1:-1] / 2595) - 1)


def log_mel(sound: Tensor) -> Tensor:
    """Power in each band and frame in dB below full scale, from −80 to 0: ``[rows, 40, 1 + samples // 320]``.

    Full scale is a sine of amplitude 1, in the band that it is at the peak of.

    Args:
        sound: samples in [−1, 1], ``[rows, samples]``; in float64, rounding is too small to show in the bytes.
    """
    window = torch.hann_window(WINDOW_SAMPLES, dtype=sound.dtype)
    # [rows, 257, frames]
    transform = torch.stft(sound, WINDOW_SAMPLES, HOP_SAMPLES, window=window, return_complex=True)
    power = (transform.real.square() + transform.imag.square()) / (WINDOW_SAMPLES / 4) ** 2
    bands = filter_bank().to(sound.dtype).T @ power
    return (10 * torch.log10(bands.clamp(min=1e-12))).clamp(-RANGE_DB, 0.0)


def codes(sound: Tensor) -> Tensor:
    """The log-mel spectrogram in bytes, 0 for −80 dB or less and 255 for full scale: ``[rows, 40, frames]``."""
    return ((log_mel(sound) + RANGE_DB) * (255 / RANGE_DB)).round().to(torch.uint8)


def decibels(codes: Tensor) -> Tensor:
    """What the bytes stand for, in dB below full scale."""
    return codes.to(torch.float32) * (RANGE_DB / 255) - RANGE_DB


def features(codes: Tensor) -> Tensor:
    """Rows for a model: one channel of numbers from −1 (silence) to 1 (full scale), ``[rows, 1, 40, frames]``."""
    return (codes.to(torch.float32) / 127.5 - 1).unsqueeze(1)
