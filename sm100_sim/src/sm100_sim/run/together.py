"""Machines that share the clusters of a launch between the cores of the host."""

from __future__ import annotations

import threading

from sm100_sim.errors import Hang

from .grid import Grid
from .machine import Machine


def _join(thread: threading.Thread, grid: Grid) -> None:
    """Wait for a thread. An interrupt ends the launch only after it, for it writes to tensors."""
    try:
        thread.join()
    except BaseException:
        grid.close()
        thread.join()
        raise


def run_together(machines: list[Machine]) -> None:
    """Run machines that share a grid, each on a thread; the caller's runs the first.

    Raises the error of the lowest cluster that fails, as a run in order does; Hang, about all
    clusters that hang, if there is no other error.
    """
    failures: list[tuple[int, BaseException]] = []
    hung: list[Machine] = []

    def work(machine: Machine) -> None:
        try:
            machine.run()
        except Hang:
            hung.append(machine)
        except BaseException as error:
            machine.grid.close()
            failures.append((machine.failed_cluster(), error))

    threads = [
        threading.Thread(target=work, args=(machine,), daemon=True) for machine in machines[1:]
    ]
    for thread in threads:
        thread.start()
    work(machines[0])
    for thread in threads:
        _join(thread, machines[0].grid)
    if failures:
        raise min(failures, key=lambda failure: failure[0])[1]
    if hung:
        raise machines[0].hang(cluster for machine in hung for cluster in machine.residents())
