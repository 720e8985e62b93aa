"""Target of the bringup in tests: the simulator, passing for a B200."""

from bench.bringup.outcome import simulated
from sm100_sim import device

SIMULATOR = simulated(device("b200"))
