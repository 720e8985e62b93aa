"""FlexAttention's score_mods as kernels evaluate them, and what is refused."""

import gc
import weakref
from dataclasses import replace

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cross_compile import compile_sm100
from cutlass.cute.runtime import from_dlpack

import sm100_sim
from fa4_hd256.integrations import score_graph
from fa4_hd256.integrations.flex_attention import score_mod_of
from fa4_hd256.integrations.score_graph import OPERATIONS, ScoreGraph, TranslationError

THREADS, SCORES = 128, 300

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
BIAS = torch.arange(4 * 33).reshape(4, 33) / 64 - 1
DOCUMENTS = torch.arange(2 * 300).reshape(2, 300) // 37
IS_LOCAL = torch.tensor([True, False, False, True])
FACTOR = torch.tensor(0.75)

FUNCTIONS = {
    "alibi": lambda s, b, h, q, k: s + SLOPES[h] * (k - q),
    "relative bias": lambda s, b, h, q, k: s + BIAS[h, (q - k).clamp(-16, 16) + 16],
    "documents": lambda s, b, h, q, k: torch.where(
        DOCUMENTS[b][q] == DOCUMENTS[b][k], s, -float("inf")
    ),
    "a number and a row": lambda s, b, h, q, k: s * FACTOR + BIAS[1, h] + BIAS[2][-3],
    "from the end": lambda s, b, h, q, k: s + BIAS[-1 - h, -1 - q % 33],
    "selections": lambda s, b, h, q, k: torch.where(
        torch.logical_or(IS_LOCAL[h] & ~(q < k) | torch.logical_not(b == 0), q > 200), s, s - 2
    ) + (q > k) * s.clone() + ((q != k) & (q >= 5)) * (k <= 9) * s.detach(),
    "capped": lambda s, b, h, q, k: torch.exp2(-h.float() / 8) * (30 * torch.tanh(s / 30)),
    "integers": lambda s, b, h, q, k: (
        s + (q - k) // 7 + (q - k) % 7 + (k - q) % (-5) + ((q & 3) | (k & 4)) + (~h)
        + torch.div(q - k, 3, rounding_mode="trunc") + torch.minimum(q, k) + (q - k).abs()
    ),
    "steps": lambda s, b, h, q, k: (
        torch.floor(s / 0.3) + torch.ceil(s) + s % 0.7 + s.sign() + s.relu() - s
        + torch.maximum(s, q * 0.01) + torch.minimum(s, k * 0.01)
        + s.clamp(-1, 1) + s.clamp(min=-2) + torch.clamp_max(s, 2)
    ),
    "powers": lambda s, b, h, q, k: (
        s**3 + (s.abs() + 1) ** 0.5 + torch.rsqrt(s * s + 1) + 1 / (s.abs() + 1)
        + torch.sqrt(s.abs() + 0.1) + (s * s + 1).reciprocal()
    ),
    "exponentials": lambda s, b, h, q, k: (
        s * torch.sigmoid(s) + torch.exp(-s.abs()) + torch.log(s * s + 1)
        + torch.log2(s.abs() + 1) + torch.log1p(s.abs()) + torch.exp2(-s.abs())
    ),
    "bits": lambda s, b, h, q, k: (
        s + (q ^ k) + ((q > 100) ^ (k > 100)) + torch.logical_xor(b, h > 1)
        # Shifts by more than a number has bits, and by less than none, have a result, too.
        + ((q << 2) + (1 << h) + (q - 150 >> 3) + (k - 150 >> h)) * 1.0
        + (torch.bitwise_left_shift(q, k % 50 - 9) % 64)
        + torch.bitwise_right_shift(q - 150, k % 50 - 9)
    ),
    "waves": lambda s, b, h, q, k: (
        torch.sin(s) * 2 + torch.cos(s - 0.1 * q) + torch.erf(s / 3) + torch.sin(q * 217.3)
    ),
    "no score": lambda s, b, h, q, k: q * 1.5,
}  # fmt: skip


@cute.kernel
def _kernel(
    scores: cute.Tensor, places: cute.Tensor, tensors: tuple, results: cute.Tensor,
    graphs: cutlass.Constexpr,
):  # fmt: skip
    number = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    if number < cute.size(scores):
        arguments = (scores[number], *(places[i, number] for i in range(4)))
        for which in cutlass.range_constexpr(len(graphs)):
            results[which, number] = graphs[which](arguments, tensors)


@cute.jit
def _evaluate(
    scores: cute.Tensor, places: cute.Tensor, tensors: tuple, results: cute.Tensor,
    graphs: cutlass.Constexpr,
):  # fmt: skip
    blocks = (cute.size(scores) + THREADS - 1) // THREADS
    _kernel(scores, places, tensors, results, graphs).launch(
        grid=(blocks, 1, 1), block=(THREADS, 1, 1)
    )


@pytest.fixture(scope="module")
def arguments():
    """(scores, (batch, head, query, key) of each)."""
    random = torch.Generator().manual_seed(0)
    scores = torch.randn(SCORES, generator=random) * 4
    bounds = (2, 4, 300, 300)
    places = [torch.randint(0, n, (SCORES,), generator=random) for n in bounds]
    return scores, torch.stack(places).int()


def evaluated(function, arguments):
    """Function and derivative of each score, (2, scores), by a kernel and by PyTorch."""
    scores, places = arguments
    functions, tensors = (function, torch.func.grad(function)), []
    graphs = tuple(ScoreGraph(f, torch.device("cpu"), tensors) for f in functions)
    results = torch.zeros(2, SCORES)
    read = score_mod_of(function).tensors
    assert len(read) == len(tensors)
    given = [
        from_dlpack(scores), from_dlpack(places), tuple(map(from_dlpack, read)),
        from_dlpack(results),
    ]  # fmt: skip
    sm100_sim.launch(compile_sm100(_evaluate, *given, graphs), *given)
    expected = [
        torch.stack([f(scores[i], *places[:, i]).float() for i in range(SCORES)]) for f in functions
    ]
    return results, torch.stack(expected)


@pytest.mark.simulator
@pytest.mark.filterwarnings("ignore:Argument tensors")
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.sampled("alibi", "relative bias", "integers")
def test_a_kernel_computes_what_pytorch_does(name, arguments):
    found, expected = evaluated(FUNCTIONS[name], arguments)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-5)


def test_every_operation_is_computed(monkeypatch):
    computed = set()
    name_of = score_graph._name

    def noted(node):
        computed.add(name_of(node))
        return name_of(node)

    monkeypatch.setattr(score_graph, "_name", noted)
    for function in FUNCTIONS.values():
        score_mod_of(function)
    assert set(OPERATIONS) <= computed


def test_what_is_added_has_no_slope():
    assert score_mod_of(FUNCTIONS["relative bias"]).slope is None
    assert score_mod_of(FUNCTIONS["capped"]).slope is not None
    assert score_mod_of(FUNCTIONS["no score"]).slope is not None


def test_a_key_follows_what_is_computed():
    def by(number, tensor=SLOPES):
        return score_mod_of(lambda s, b, h, q, k: s + number * tensor[h]).key

    assert by(1.0) == by(1.0) == by(1.0, SLOPES + 1)
    assert len({by(1.0), by(2.0), by(1.0, IS_LOCAL), by(1.0, torch.ones(4).int())}) == 4


def test_tensors_live_as_long_as_users_keep_them():
    """A process knows the function for ever, but not its tensors."""
    table = torch.arange(4.0) + 0.125
    kept = weakref.ref(table)
    mod = score_mod_of(lambda s, b, h, q, k, table=table: s * table[h])
    del mod, table
    gc.collect()
    assert kept() is None


def test_a_function_may_be_traced_again():
    def twice(key=None):
        mods = [score_mod_of(lambda s, b, h, q, k, n=n: s * n) for n in (2.0, 2.0, 3.0)]
        for mod in mods:
            replace(mod, key=key or mod.key)

    twice()
    with pytest.raises(ValueError, match="'of mine' of a score_mod names other functions"):
        twice("of mine")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda s, b, h, q, k: s if q > k else -s, "branches on a value"),
        (lambda s, b, h, q, k: s + float(q), "Python number"),
        (lambda s, b, h, q, k: torch.special.i0(s), "computes aten.i0"),
        (lambda s, b, h, q, k: s + BIAS[h].sum(), "computes aten.sum"),
        (lambda s, b, h, q, k: s + BIAS[:, 0][h], "one number per dimension|computes"),
        (lambda s, b, h, q, k: s // 2, "derivative"),
    ],
    ids=["branch", "number", "operator", "sum", "slice", "no derivative"],
)
def test_what_kernels_cannot_evaluate_is_refused(function, message):
    with pytest.raises(TranslationError, match=message):
        score_mod_of(function)
