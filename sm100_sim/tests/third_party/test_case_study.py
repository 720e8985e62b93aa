"""docs/case_study_clc.md: flash-attn-4's head_dim 256 forward with launch control forced on."""

import math

import pytest
import torch
from cross_compile import compile_sm100, targeting
from test_third_party import B200, Attention, check

import sm100_sim
from sm100_sim.errors import Hang, SimulationError

pytestmark = [
    pytest.mark.third_party,
    pytest.mark.sampled,
    pytest.mark.simulator,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Argument aux_data"),
]

cutlass = pytest.importorskip("cutlass")
forward = pytest.importorskip("flash_attn.cute.flash_fwd_sm100")

HEAD_DIM = 256
SEQLEN = 512
#: An odd number of blocks of 128 query rows.
ODD_SEQLEN = 640


@pytest.fixture
def compiled(request, monkeypatch):
    """(launch, mask): the two-CTA kernel with use_clc_scheduler=True, as published or with its
    tiles counted in clusters; the window is wide enough to hide nothing."""
    import cuda.bindings.driver as cuda

    mask, counted_in_clusters = request.param
    monkeypatch.setattr(cutlass.utils, "HardwareInfo", B200)
    if counted_in_clusters:
        published = forward.TileSchedulerArguments

        def in_clusters(num_block, *arguments, **options):
            options["use_cluster_idx"] = True
            return published((num_block + 1) // 2, *arguments, **options)

        monkeypatch.setattr(forward, "TileSchedulerArguments", in_clusters)
    with targeting():
        kernel = forward.FlashAttentionForwardSm100(
            HEAD_DIM, HEAD_DIM, qhead_per_kvhead=2, is_causal=mask == "causal",
            is_local=mask == "window", m_block_size=128, n_block_size=128, q_stage=1,
            is_static_persistent=False, use_2cta_instrs=True, use_clc_scheduler=True,
        )  # fmt: skip
    keywords = {"stream": cuda.CUstream(0)}
    if mask == "window":
        width = cutlass.Int32(10_000)
        keywords |= {"window_size_left": width, "window_size_right": width}
    arguments = Attention.random(256, HEAD_DIM).arguments()
    function = compile_sm100(kernel, *arguments, **keywords)

    def launch(call, **options):
        return sm100_sim.launch(function, *call.arguments(), **keywords, **options)

    return launch, mask


@pytest.mark.parametrize("compiled", [("causal", False)], indirect=True, ids=str)
def test_as_published_it_hangs(compiled):
    """The leader's warps have finished their tile; the peer's softmax waits for a third S, which
    the leader never computes."""
    launch, _ = compiled
    with pytest.raises(Hang) as raised:
        launch(Attention.random(SEQLEN, HEAD_DIM))
    waiting = str(raised.value)
    scheduler, softmax = (
        next(line for line in waiting.splitlines() if f"CTA {warp} " in line)
        for warp in ("(2, 0, 0) warp 15", "(3, 0, 0) warp 0")
    )
    assert "288 of 1024 arrivals pending" in scheduler
    assert "phase 2 (parity 0), 1 of 1 arrivals pending" in softmax


@pytest.mark.parametrize("compiled", [("full", False)], indirect=True, ids=str)
def test_as_published_rows_are_left_out(compiled):
    """Both CTAs take as many steps without a mask, and the trace shows which rows they store."""
    launch, _ = compiled
    call = Attention.random(SEQLEN, HEAD_DIM)
    report = launch(call, trace=True)
    unwritten = call.out.isnan().flatten(2).any(-1)[0].nonzero().ravel()
    assert unwritten.tolist() == list(range(128, 384))
    assert output_rows(report) == {0: 0, 1: 384, 2: 512, 3: 896}


@pytest.mark.parametrize("compiled", [("window", False)], indirect=True, ids=str)
def test_as_published_it_traps(compiled):
    """Five blocks of 128 rows, the longest first: halving rounds down and the last pair's block
    is -1. Its rows begin at -512 and -128: either a CTA's store of LSE is the first to leave the
    tensor, or the store of O by TMA, whose coordinates may not be negative."""
    launch, _ = compiled
    with pytest.raises(SimulationError) as raised:
        launch(Attention.random(ODD_SEQLEN, HEAD_DIM))
    message = str(raised.value)
    if "st.global" in message:
        assert "outside the tensors of the launch: 4 bytes" in message
        assert "it begins 512 bytes behind" in message or "it begins 2048 bytes behind" in message
    else:
        assert "a tensor store at the coordinates (0, -512, 0, 0)" in message
        assert "illegal instruction" in message


@pytest.mark.parametrize(
    "compiled", [("causal", True), ("full", True), ("window", True)], indirect=True, ids=str
)
def test_counted_in_clusters_it_is_right(compiled):
    """Tiles are stolen, and results and synchronisation are right."""
    launch, mask = compiled
    for seqlen in (SEQLEN, ODD_SEQLEN):
        call = Attention.random(seqlen, HEAD_DIM)
        report = launch(call, clusters=2, sanitize=True)
        assert report.findings == []
        assert report.clc["stolen"] > 0
        check(call, mask == "causal")


def output_rows(report) -> dict[int, int]:
    """First row of out that each CTA of head 0 stores, from the coordinates of its TMA stores."""
    stores = (e for e in report.trace if e.opcode.startswith("cp.async.bulk.tensor.4d.global"))
    return {e.ctaid[0]: e.operands[0][1][1] for e in stores if e.ctaid[1] == 0}


def test_reference_is_not_the_kernel():
    """The check of the third test can fail."""
    call = Attention.random(256, HEAD_DIM)
    call.out.copy_(torch.zeros_like(call.out))
    call.lse.fill_(math.nan)
    with pytest.raises(AssertionError):
        check(call, True)
