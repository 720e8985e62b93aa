"""Settings that options of commands name, without what reads them: nothing here loads PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

#: Content of L2 when a run begins, by state.
L2_CONTENTS = {
    (COLD := "cold"): "lines of others that are still to be written to HBM",
    (CLEAN := "clean"): "lines of others that were read only, as weights are",
    (WARM := "warm"): "what the run before left",
}
L2_STATES = tuple(L2_CONTENTS)
#: Timed runs of each call, however long they take.
LEAST_RUNS = 8


@dataclass(frozen=True)
class Sampling:
    """Number of runs of each call: `warmup` times before it counts, `runs` times that do. seconds:
    of all rounds together; where a round takes so long that they would need more, there are fewer
    of both kinds, and of timed ones at least `LEAST_RUNS`. None for no limit."""

    warmup: int = 32
    runs: int = 128
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.warmup < 0 or self.runs < 1:
            raise ValueError(
                f"{self.warmup} warm-up and {self.runs} timed runs; accepted are 0 and more, and "
                "1 and more"
            )
        if self.seconds is not None and self.seconds <= 0:
            raise ValueError(f"{self.seconds} seconds for all runs; accepted: more than 0")

    def limited(self, round_seconds: float) -> Sampling:
        """Return the sampling that fits, if each round takes so long."""
        whole = round_seconds * (self.warmup + self.runs)
        if self.seconds is None or whole <= self.seconds:
            return self
        share, least = self.seconds / whole, min(self.runs, LEAST_RUNS)
        return Sampling(int(self.warmup * share), max(int(self.runs * share), least))


@dataclass(frozen=True)
class Shape:
    """Shape of the model that `python -m bench training` trains, and of its batches. Every
    `full_every`-th layer sees all keys before a query, the others `window` to its left; 0: no layer
    has a window."""

    layers: int = 6
    hidden: int = 512
    heads: int = 4
    heads_kv: int = 2
    vocabulary: int = 512
    window: int = 255
    full_every: int = 6
    batch: int = 8
    seqlen: int = 1024

    def window_of(self, layer: int) -> int | None:
        """Return the window of a layer, None where it sees all keys before a query."""
        return None if not self.window or (layer + 1) % self.full_every == 0 else self.window
