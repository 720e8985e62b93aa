"""Scales of K and V in e4m3: every accepted form is one value per entry and KV head."""

from __future__ import annotations

import pytest
import torch

from fa4_hd256.call.descales import check_values, descale_of, scale_layout
from fa4_hd256.kernels.problem_class import OF_PAGES, OF_SEQUENCES

SEQUENCES, PAGES, HEADS = 3, 5, 2


@pytest.mark.parametrize(
    ("entries", "shapes", "form"),
    [(SEQUENCES, ((3, 2), (3, 2, 1), (1, 3, 2, 1)), OF_SEQUENCES),
     (PAGES, ((5, 2), (5, 1, 2), (5, 1, 2, 1)), OF_PAGES)],
    ids=("of sequences", "of pages"),
)  # fmt: skip
def test_forms(entries, shapes, form):
    k, values = torch.empty(PAGES, 16, HEADS, 256), torch.randn(entries, HEADS)
    for shape in shapes:
        given = values.view(shape)
        assert descale_of({"k_descale": given, "v_descale": given}, k, SEQUENCES, True) == form
        assert torch.equal(scale_layout(given, form), values)


def test_as_many_pages_as_sequences():
    """Two dimensions could mean either; one value, and one that is expanded, mean the same."""
    k, values = torch.empty(SEQUENCES, 16, HEADS, 256), torch.rand(SEQUENCES, HEADS)

    def form(given):
        return descale_of({"k_descale": given, "v_descale": given}, k, SEQUENCES, True)

    for one in (torch.ones(()), torch.ones(1), torch.ones(1, 1, 1)):
        assert form(one) == OF_SEQUENCES
    assert form(values[:1].expand(SEQUENCES, HEADS)) == OF_SEQUENCES
    with pytest.raises(ValueError, match="as many sequences as pages"):
        form(values)
    assert form(values.view(1, SEQUENCES, HEADS, 1)) == OF_SEQUENCES
    assert form(values.view(SEQUENCES, 1, HEADS, 1)) == OF_PAGES


@pytest.mark.parametrize("entries", [SEQUENCES, 1])
def test_one_value_for_many_is_one_entry(entries):
    """Expanded dimensions, of a view without stride, are taken once."""
    of_heads = torch.randn(1, HEADS).expand(entries, HEADS)
    assert torch.equal(scale_layout(of_heads, OF_SEQUENCES), of_heads[:1])
    of_entries = torch.randn(SEQUENCES, 1).expand(SEQUENCES, HEADS)
    assert torch.equal(scale_layout(of_entries, OF_SEQUENCES), of_entries[:, :1])
    one = torch.randn(())
    assert torch.equal(scale_layout(one, OF_SEQUENCES), one.view(1, 1))


def test_factors_of_pages_that_are_read():
    """Refuse a factor of a page that is read, or of a sequence; others may be anything."""
    values = torch.ones(PAGES, HEADS)
    values[1] = 0.0
    read, all_pages = torch.tensor([[0, 2]]), torch.arange(PAGES)
    check_values({"k_descale": values}, OF_PAGES, read)
    for form, pages in ((OF_PAGES, all_pages), (OF_PAGES, None), (OF_SEQUENCES, read)):
        with pytest.raises(ValueError, match="k_descale has a factor of 0.0; accepted: finite"):
            check_values({"k_descale": values}, form, pages)
