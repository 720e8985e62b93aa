"""flash-attn-4's forward kernels, unmodified, against a float64 reference.

That a kernel nobody wrote for this simulator gives the right numbers is what makes the simulator
believable. head_dim 256 is the two-CTA kernel (cta_group::2, P in TMEM), head_dim 128 the one with
two query tiles per CTA.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from cross_compile import compile_sm100, targeting

import sm100_sim

pytestmark = [
    pytest.mark.third_party,
    pytest.mark.sampled,
    pytest.mark.simulator,
    # flash-attn-4 is older than the DSL it runs on here.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Argument aux_data"),
]

cutlass = pytest.importorskip("cutlass")
forward = pytest.importorskip("flash_attn.cute.flash_fwd_sm100")


class B200:
    """The figures that flash-attn-4 queries the driver for."""

    def get_device_multiprocessor_count(self):
        return 148

    def get_max_active_clusters(self, size, stream=None):
        return 148 // size

    def get_l2_cache_size_in_bytes(self):
        return 126 << 20


@dataclass(frozen=True)
class Case:
    """One compiled kernel: head_dim, mask, whether a CTA pair works on one tile."""

    head_dim: int
    causal: bool
    pair: bool


@dataclass
class Attention:
    """Inputs and results of one call, (1, seqlen, heads, head_dim), two query heads per KV head."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def random(cls, seqlen: int, head_dim: int):
        q, k, v = (
            torch.randn(1, seqlen, heads, head_dim, dtype=torch.bfloat16) for heads in (2, 1, 1)
        )
        return cls(q, k, v, torch.full_like(q, math.nan), torch.full((1, 2, seqlen), math.nan))

    def arguments(self):
        from cutlass.cute.runtime import from_dlpack

        tensors = [
            from_dlpack(t, assumed_align=16).mark_layout_dynamic(leading_dim=t.ndim - 1)
            for t in (self.q, self.k, self.v, self.out, self.lse)
        ]
        return *tensors, cutlass.Float32(1 / math.sqrt(self.q.shape[-1]))

    def reference(self, dtype: torch.dtype, causal: bool):
        """Return (out, lse) computed in `dtype`."""
        q, k, v = (t.to(dtype).transpose(1, 2) for t in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
        out = torch.softmax(scores, -1) @ v
        return out.transpose(1, 2), torch.logsumexp(scores, -1)


_compiled = {}


@pytest.fixture
def compiled(request, monkeypatch):
    """The kernel of `request.param`, compiled once for all tests of this file."""
    import cuda.bindings.driver as cuda

    case = request.param
    if case not in _compiled:
        monkeypatch.setattr(cutlass.utils, "HardwareInfo", B200)
        with targeting():
            kernel = forward.FlashAttentionForwardSm100(
                case.head_dim, case.head_dim, qhead_per_kvhead=2, is_causal=case.causal,
                m_block_size=128, n_block_size=128, q_stage=1 if case.head_dim == 256 else 2,
                is_static_persistent=not case.causal, use_2cta_instrs=case.pair,
            )  # fmt: skip
        example = Attention.random(256, case.head_dim).arguments()
        _compiled[case] = compile_sm100(kernel, *example, stream=cuda.CUstream(0))
    return case, _compiled[case], {"stream": cuda.CUstream(0)}


def check(call: Attention, causal: bool):
    """Error at most that of PyTorch in bf16; every element written."""
    out, lse = call.reference(torch.float64, causal)
    low, _ = call.reference(torch.bfloat16, causal)
    error = (call.out.double() - out).abs().max().item()
    assert error <= (low.double() - out).abs().max().item()
    assert (call.lse.double() - lse).abs().max().item() < 1e-3


FULL_256, CAUSAL_256 = Case(256, False, True), Case(256, True, True)
CASES = [
    # A length of whole tiles, and one that ends inside a tile of keys and of queries.
    (FULL_256, 512),
    (CAUSAL_256, 330),
    (Case(128, False, False), 256),
    (Case(128, True, False), 330),
]


@pytest.mark.parametrize(("compiled", "seqlen"), CASES, indirect=["compiled"], ids=str)
def test_forward(compiled, seqlen):
    case, function, keywords = compiled
    call = Attention.random(seqlen, case.head_dim)
    report = sm100_sim.launch(function, *call.arguments(), **keywords)
    check(call, case.causal)
    assert report.findings == []
    assert math.prod(report.cluster) == (2 if case.pair else 1)
    assert report.lanes("mufu.ex2") > 0
    if case == FULL_256:
        # 2 heads x 2 query tiles of 256 x 4 key tiles of 128, K = 16: 16 for Q K^T, 8 for P V.
        assert report.warps("tcgen05.mma") == 2 * 2 * 4 * (16 + 8)
        # Every CTA loads its half of each K and V tile, and its own queries.
        tile_bytes = 128 * 256 * 2
        assert report.tma["load_bytes"] == 2 * 2 * (2 * tile_bytes + 4 * 2 * tile_bytes)
        assert report.tma["store_bytes"] == call.out.nbytes


@pytest.mark.parametrize("options", [{}, {"schedule": "lazy"}, {"seed": 3}], ids=str)
@pytest.mark.parametrize(("compiled", "seqlen"), CASES, indirect=["compiled"], ids=str)
def test_forward_is_clean_under_the_sanitizer(compiled, seqlen, options):
    case, function, keywords = compiled
    call = Attention.random(seqlen, case.head_dim)
    report = sm100_sim.launch(function, *call.arguments(), **keywords, **options, sanitize=True)
    assert report.findings == []
    check(call, case.causal)


@pytest.mark.parametrize("compiled", [FULL_256], indirect=True, ids=str)
def test_every_schedule_gives_the_same_bits(compiled):
    case, function, keywords = compiled
    call = Attention.random(384, case.head_dim)
    results = []
    for options in ({}, {"schedule": "lazy"}, {"seed": 1}, {"seed": 2}, {"clusters": 1}):
        call.out.fill_(math.nan)
        call.lse.fill_(math.nan)
        report = sm100_sim.launch(function, *call.arguments(), **keywords, **options)
        assert report.findings == []
        results.append((call.out.clone(), call.lse.clone()))
    for out, lse in results[1:]:
        assert torch.equal(out.view(torch.int16), results[0][0].view(torch.int16))
        assert torch.equal(lse.view(torch.int32), results[0][1].view(torch.int32))


@pytest.mark.parametrize("compiled", [CAUSAL_256], indirect=True, ids=str)
def test_environment_and_report_file(compiled, monkeypatch, tmp_path):
    case, function, keywords = compiled
    path = tmp_path / "reports.jsonl"
    monkeypatch.setenv("SM100_SIM_REPORT", str(path))
    monkeypatch.setenv("SM100_SIM_CLUSTERS", "1")
    monkeypatch.setenv("SM100_SIM_SEED", "7")
    call = Attention.random(256, case.head_dim)
    steps = []
    report = sm100_sim.launch(
        function, *call.arguments(), **keywords, clusters=2, progress=lambda *s: steps.append(s)
    )
    assert (report.seed, report.resident_clusters) == (7, 2)
    assert sm100_sim.last_reports()[-1] is report
    assert path.read_text() == report.to_json() + "\n"
    assert steps == [(1, 2), (2, 2)]
    monkeypatch.setenv("SM100_SIM_CLUSTERS", "many")
    with pytest.raises(ValueError, match="SM100_SIM_CLUSTERS is 'many'"):
        sm100_sim.launch(function, *call.arguments(), **keywords)


@pytest.mark.parametrize("compiled", [FULL_256], indirect=True, ids=str)
def test_issue_order_is_in_the_trace(compiled):
    """Per key tile this kernel issues 16 MMAs into S at column 0, then 8 into O at column 256."""
    case, function, keywords = compiled
    call = Attention.random(512, case.head_dim)
    report = sm100_sim.launch(function, *call.arguments(), **keywords, trace=True)
    mmas = [e for e in report.trace if e.opcode.startswith("tcgen05.mma")]
    assert len(mmas) == report.warps("tcgen05.mma")
    leaders = {entry.ctaid for entry in mmas}
    assert leaders == {(x, 0, 0) for x in range(0, 8, 2)}
    for leader in leaders:
        accumulators = [entry.operands[0] for entry in mmas if entry.ctaid == leader]
        assert accumulators == ([0] * 16 + [256] * 8) * 4
    loads = [e for e in report.trace if e.opcode.startswith("cp.async.bulk.tensor.4d.shared")]
    _, coordinates = loads[0].operands[1]
    assert len(coordinates) == 4
