"""Run studies side by side, in as many processes as there are cores, and record each as soon as it is done."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty, Queue
from threading import Event, Thread
from typing import Any

import torch

from selffl.reports.record import StudyRecord, save_study
from selffl.studies import DEMO, STUDIES
from selffl.studies.arms import shared_workers, sigint_blocked, stop_workers
from selffl.studies.result import Job

OnProgress = Callable[[str, int, int, str], None]  # study, steps done, steps in all, what comes next


@contextmanager
def one_thread() -> Iterator[None]:
    """Tensors of a study are small: a second thread costs more than it brings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@one_thread()
def _run(on_progress: OnProgress, study_id: str, folder: Path, job: Job) -> StudyRecord:
    """One study, from its first run to its record."""
    study = DEMO if study_id == DEMO.id else STUDIES[study_id]
    began = time.perf_counter()
    with shared_workers(job.num_processes):
        result = study.run(replace(job, progress=partial(on_progress, study_id), folder=folder / study_id / "runs"))
    seconds = time.perf_counter() - began
    words = ["demo"] if study_id == DEMO.id else ["paper", "run", study_id]
    words += ["--quick"] if job.quick else []
    words += ["--device", job.device] if job.device != "cpu" else []
    words += ["--seeds", str(job.num_seeds)] if job.num_seeds else []
    command = shlex.join(["selffl", *words])
    return save_study(study, result, folder / study_id, command=command, is_quick=job.quick, seconds=seconds)


def _run_in_process(news: Queue[Any], *arguments: Any) -> StudyRecord:
    """One study in a process of its own, which puts its progress into a queue."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # asked to end, it ends its own training runs first
    return _run(lambda *progress: news.put(progress), *arguments)


def run_studies(
    ids: Sequence[str],
    folder: Path,
    *,
    quick: bool,
    device: str = "cpu",
    num_processes: int | None = None,
    num_seeds: int | None = None,
    on_progress: OnProgress,
    on_record: Callable[[StudyRecord], None],
) -> None:
    """Run the studies, as many at a time as there are cores; what is finished stays, whatever happens to the rest.

    One at a time they run in this process: another spends seconds on imports.
    ``num_processes`` are for the training runs of one study; none: the cores, shared among the studies.  ``num_seeds``
    are the repeats of those that train; none: their own number.
    """
    cores = os.cpu_count() or 1
    workers = min(len(ids), cores)
    each = num_processes or max(cores // workers, 1)
    options = (folder, Job(quick, device=device, num_processes=each, num_seeds=num_seeds))
    if workers == 1:
        for study_id in ids:
            on_record(_run(on_progress, study_id, *options))
        return
    context = multiprocessing.get_context("spawn")
    stop = Event()
    with context.Manager() as manager:
        news: Queue[Any] = manager.Queue()

        def pass_on() -> None:
            while not stop.is_set():
                try:
                    on_progress(*news.get(timeout=0.1))
                except (Empty, EOFError, OSError):
                    continue

        listener = Thread(target=pass_on, daemon=True)
        listener.start()
        pool = ProcessPoolExecutor(workers, mp_context=context)
        try:
            with sigint_blocked():
                futures = [pool.submit(_run_in_process, news, study_id, *options) for study_id in ids]
            for future in as_completed(futures):
                on_record(future.result())
        except BaseException:
            stop_workers(pool)
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            stop.set()
            listener.join()
