"""Speed and memory of two implementations, side by side in one run.

A case is a function at the top of a module that prepares its data and returns the function to measure. Each case runs
in a process of its own, so that its peak memory is its own; the repetitions of two cases take turns, so that both see
the same machine.
"""

import multiprocessing
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import torch

Case = Callable[..., Callable[[], object]]


@dataclass(frozen=True)
class Measurement:
    """Seconds of each repetition, and the growth of peak memory over what was there before the first."""

    seconds: tuple[float, ...]
    memory_mib: float

    @property
    def median(self) -> float:
        """Median of the seconds."""
        return statistics.median(self.seconds)


def peak_mib() -> float:
    """Peak resident memory of this process (Linux reports KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(cases: Sequence[tuple[Case, tuple[object, ...]]], repeats: int) -> list[Measurement]:
    """Run cases (function, arguments) in turns, each in its own process; one unmeasured turn comes first."""
    context = multiprocessing.get_context("spawn")
    workers = []
    for case, arguments in cases:
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(there, case, arguments), daemon=True)
        process.start()
        workers.append((process, here))
    for _, pipe in workers:
        pipe.recv()
    times: list[list[float]] = [[] for _ in workers]
    for turn in range(repeats + 1):
        for own, (_, pipe) in zip(times, workers, strict=True):
            pipe.send("run")
            seconds = pipe.recv()
            if turn:
                own.append(seconds)
    measurements = []
    for own, (process, pipe) in zip(times, workers, strict=True):
        pipe.send("stop")
        measurements.append(Measurement(tuple(own), pipe.recv()))
        process.join()
    return measurements


def _serve(pipe: Connection, case: Case, arguments: tuple[object, ...]) -> None:
    run = case(*arguments)
    before = peak_mib()
    pipe.send("ready")
    while pipe.recv() == "run":
        start = time.perf_counter()
        run()
        pipe.send(time.perf_counter() - start)
    pipe.send(peak_mib() - before)


def describe_machine() -> str:
    """One line on where this runs."""
    threads = torch.get_num_threads()
    return f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__} with {threads} threads"


def print_comparison(title: str, ours: Measurement, peer: Measurement, peer_name: str) -> None:
    """One row: ours, the peer's, the ratio (below 1 is faster), and both peaks of memory."""
    ratio = ours.median / peer.median
    times = f"ours {ours.median:8.3f} s   {peer_name} {peer.median:8.3f} s   ratio {ratio:6.3f}"
    print(f"{title:<44} {times}   memory {ours.memory_mib:7.0f} / {peer.memory_mib:.0f} MiB")


def print_single(title: str, ours: Measurement) -> None:
    """One row without a peer."""
    print(f"{title:<44} ours {ours.median:8.3f} s   memory {ours.memory_mib:7.0f} MiB")


def growth_exponent(sizes: Sequence[int], measurements: Sequence[Measurement]) -> float:
    """Slope of log seconds against log size."""
    logs = np.log([m.median for m in measurements])
    return float(np.polyfit(np.log(sizes), logs, 1)[0])
