"""Order in which a rank sends and works in ring attention."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fa4_hd256.call.options import ExactWindow, Options, window_of
from fa4_hd256.integrations.context_parallel import local, ring
from fa4_hd256.integrations.context_parallel.exchange import Transfer
from fa4_hd256.integrations.context_parallel.local import LocalResults, Settings
from fa4_hd256.integrations.context_parallel.spans import parts_of

RANKS, ROWS = 2, 16


def walked(monkeypatch, order, window):
    """Return what rank 0 does: ("send",) or ("work", queries, keys)."""
    done = []

    def start(sends, receives):
        done.append(("send",))
        for tensor, _ in receives:
            tensor.zero_()
        return Transfer()

    def work(own, held, sums, parts, settings):
        done.extend(("work", len(part.queries), len(part.keys)) for part in parts)

    monkeypatch.setattr(ring, "add_gradients", work)
    settings = Settings(Options(1.0, window, 0.0), order, RANKS * ROWS)
    ranks = SimpleNamespace(rank=0, count=RANKS, start=start)
    rows = torch.zeros(1, ROWS, 1, 8, dtype=torch.bfloat16)
    own = LocalResults(rows, rows, rows, torch.zeros(1, 1, ROWS), None)
    ring.RingAttention(ranks, ROWS, settings).gradients(own, (rows, rows))
    return done


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("window", [(None, None), (None, 0), (40, 9)])
def test_every_transfer_has_work_beside_it(monkeypatch, order, window):
    """Transfers are those of keys, and of sums of dK and dV on their way home."""
    kinds = [event[0] for event in walked(monkeypatch, order, window)]
    sent = [number for number, kind in enumerate(kinds) if kind == "send"]
    assert sent[0] == 0 and kinds[1] == "work"
    assert "work" in kinds[sent[-1] :]


def test_one_rank_that_sees_itself_alone_is_one_call(monkeypatch):
    """Nothing is left for the end without an exchange."""
    done = walked(monkeypatch, "contiguous", (0, 0))
    assert [event for event in done if event[0] == "work"] == [("work", ROWS, ROWS)]


def test_short_work_stands_between_a_transfer_and_the_next_attention(monkeypatch):
    """NOTE [room for a transfer]: sums are filled, or what was found last is taken in."""
    done = []

    def start(sends, receives):
        done.append("send")
        return Transfer()

    def attention(q, held, part, settings):
        done.append("attention")
        return q[:, : len(part.queries)], torch.zeros(1, 1, len(part.queries))

    class Sums(local.Attended):
        def __init__(self, q):
            done.append("fill")
            super().__init__(q)

        def _merge(self):
            if self._latest is not None:
                done.append("sum")
            super()._merge()

    monkeypatch.setattr(local, "_forward", attention)
    monkeypatch.setattr(ring, "Attended", Sums)
    settings = Settings(Options(1.0, (None, None), 0.0), "contiguous", 4 * ROWS)
    ranks = SimpleNamespace(rank=0, count=4, start=start)
    rows = torch.zeros(1, ROWS, 1, 8, dtype=torch.bfloat16)
    walk = ring.RingAttention(ranks, ROWS, settings)
    out, _ = walk.attend(rows, (rows, rows)).results(None, rows.dtype)
    between = ["send", "sum", "attention"]
    assert done == ["send", "fill", "attention", *between * 3, "sum"]
    assert torch.equal(out, rows)


def test_a_bound_of_minus_one_stays_one(monkeypatch):
    """Packed documents get the window of the whole sequence, whose -1 users cannot give."""
    asked = []

    def attend(q, k, v, *offsets, **given):
        asked.append(window_of(given["window_size"]))
        return q, q.new_zeros(q.shape[1], len(q))

    monkeypatch.setattr(local, "flash_attn_varlen_func", attend)
    options = Options(1.0, window_of(ExactWindow(-1, 5)))
    settings = Settings(options, "contiguous", ROWS, (0, 8, ROWS))
    rows = torch.zeros(1, ROWS, 1, 256)
    parts = parts_of((range(ROWS),), (range(ROWS),), settings.mask)
    local.Attended(rows).add(rows, (rows, rows), parts, settings)
    assert asked == [(-1, 5)]
