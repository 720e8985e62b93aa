"""The training that is measured: attentions agree, batches repeat, the table says what differs."""

from dataclasses import fields

import pytest
import torch

from bench.__main__ import main
from bench.commands import training as command
from bench.measure import training
from bench.tables.results import read_json

CPU = torch.device("cpu")
SHAPE = training.Shape(
    layers=2, hidden=64, heads=2, heads_kv=1, vocabulary=32, window=40, full_every=2, batch=1,
    seqlen=128,
)  # fmt: skip


def test_batches_repeat_and_their_second_half_the_first():
    first = training.batch_of(3, SHAPE)
    assert torch.equal(first, training.batch_of.__wrapped__(3, SHAPE))
    assert first.shape == (1, 129)
    half = SHAPE.seqlen // 2 + 1
    assert torch.equal(first[:, half:], first[:, : 129 - half])
    assert not torch.equal(first, training.batch_of(4, SHAPE))


@pytest.mark.parametrize("name", ["ours", "SDPA bf16", "float32, rounded as kernels do"])
@pytest.mark.sampled
def test_steps_follow_those_of_float32(name):
    """The tolerance is bf16's rounding in two small layers: another mask moves the loss far
    more."""
    exact = training.train(training.sdpa_float32, SHAPE, 3, CPU).losses
    found = training.train(training.IMPLEMENTATIONS[name], SHAPE, 3, CPU).losses
    assert found == pytest.approx(exact, abs=2e-3)

    def unbounded(q, k, v, window):
        return training.sdpa_float32(q, k, v, None)

    other = training.train(unbounded, SHAPE, 3, CPU).losses
    assert max(abs(a - b) for a, b in zip(other, exact)) > 1e-2


def test_table():
    run = training.Run([3.0, 2.0, 1.0], 5.0)
    other = training.Run([3.0, 2.0, 1.5], 4.0)
    found = {"SDPA float32": run, "ours": other, "flash-attn-4": "no CUDA device"}
    origin = {"basis": "measured", "machine": "GPU"}
    of_seeds = {0: found | {"ours, again": other}, 5: found | {"ours, again": run}}
    table = command.table(of_seeds, 3, origin, "2 layers")
    exact, ours, theirs, again = table.rows[:4]
    assert ours["apart"] == pytest.approx(0.5 / 3) and ours["equal"] == "the same"
    assert ours["at"] == 3 and ours["end"] == ours["apart"]
    assert exact["apart"] is None and theirs["status"] == "no CUDA device"
    assert table.rows[5]["equal"] == "others" and table.rows[5]["seed"] == 5
    assert "2 layers. Losses in nats" in table.as_markdown()


def test_rounding_needs_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shape = [
        word for field in fields(SHAPE)
        for word in (f"--{field.name.replace('_', '-')}", str(getattr(SHAPE, field.name)))
    ]  # fmt: skip
    given = ["training", "--steps", "2", *shape, "--seed", "3", "--seed", "4", "--json"]
    assert main(given) == 0
    (table,) = read_json(capsys.readouterr().out)
    assert [(row["seed"], row["attention"], row["basis"]) for row in table.rows] == [
        (seed, name, "computed") for seed in (3, 4)
        for name in (command.REFERENCE, command.ROUNDED)
    ]  # fmt: skip
    assert table.rows[1]["apart"] != 0 and table.rows[0]["losses"] != table.rows[2]["losses"]
    assert main([*given, "--within", "0"]) == 0
    (table,) = read_json(capsys.readouterr().out)
    assert [row["status"] for row in table.rows] == ["ok", *["not begun within 0.0 s"] * 3]


def test_ours_wants_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["training", "--attention", "ours"]) == 2
    assert "--attention ours without a CUDA device; accepted" in capsys.readouterr().err


def test_rounding_changes_gradients_by_what_bf16_lacks():
    generator = torch.Generator().manual_seed(0)
    exact = [torch.randn(1, 96, 2, 256, generator=generator, requires_grad=True) for _ in range(3)]
    found = [t.detach().bfloat16().float().requires_grad_() for t in exact]
    d_out = torch.randn(1, 96, 2, 256, generator=generator)
    for attention, given in ((training.sdpa_float32, exact), (training.rounded, found)):
        attention(*given, 20).backward(d_out)
    for a, b in zip(exact, found):
        error = (a.grad - b.grad).norm() / a.grad.norm()
        assert 1e-3 < error < 1e-2
