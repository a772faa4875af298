"""Running the functions of a build in several processes of this machine."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Final

import torch

from genius_search.cluster.build import Work, run_here
from genius_search.errors import UsageError

MOST_DEATHS: Final = 3
"""How often processes may die before the build gives up."""


class LocalProcesses:
    """Runs the functions of a build in ``count`` processes; work of one that dies is done again by another.

    With one process, it is this one.

    Raises
    ------
    UsageError
        ``count`` is below 1; or, while it runs, processes died too often.
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise UsageError(f"--local is {count}, expected the number of processes")
        self._count = count

    def __call__(self, work: Work, folder: Path, numbers: Sequence[int]) -> Iterator[int]:
        """Run a function for each number; yield the numbers as they are done."""
        if self._count == 1:
            yield from run_here(work, folder, numbers)
            return
        left = list(numbers)
        deaths = 0
        while left:
            pool = ProcessPoolExecutor(
                self._count,
                mp_context=multiprocessing.get_context("spawn"),  # PyTorch's threads do not survive a fork
                initializer=torch.set_num_threads,
                initargs=(max(1, (os.cpu_count() or 1) // self._count),),
            )
            try:
                running = {pool.submit(work, folder, number): number for number in left}
                for future in as_completed(running):
                    future.result()
                    left.remove(running[future])
                    yield running[future]
            except BrokenProcessPool:
                deaths += 1
                if deaths > MOST_DEATHS:
                    raise UsageError(
                        f"processes died {deaths} times, perhaps for want of memory; give a smaller --local "
                        "or --rows. The same command goes on with what is done"
                    ) from None
            finally:
                pool.shutdown(cancel_futures=True)
