"""The constants that lab/docs/timing.md calls frozen are those that predictions use."""

import pytest
from checkout import ROOT

from lab.model.origin import modelled_machine
from sm100_sim.timing import load, machines

PAGE = ROOT / "lab" / "docs" / "timing.md"


@pytest.mark.parametrize("name", machines())
def test_digest_is_in_the_documentation(name):
    """A constant that changes changes the digest: then reprint every comparison, and the page."""
    machine, digest = modelled_machine(load(name)).split(" modelled, constants ")
    assert f"{machine} {digest}" in " ".join(PAGE.read_text("utf-8").split())
