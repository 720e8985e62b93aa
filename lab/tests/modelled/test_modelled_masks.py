"""Masks on the timing model: what is not modelled is refused."""

import pytest
import torch

from bench.__main__ import main


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--machine", "h200"], "accepted: a machine of Blackwell"),
        (["--only", "chess"], "no case has 'chess' in its line; there are masks: 4x4096"),
        (["--only", "scores"], "or packed sequences alone, which are not modelled"),
        (["--only", "ragged"], "or packed sequences alone, which are not modelled"),
    ],
)
def test_what_is_not_accepted(given, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["masks", *given]) == 2
    assert message in capsys.readouterr().err
