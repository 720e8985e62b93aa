"""The backend inside SGLang's own classes: registry, pools, batches, layer, on CPU tensors too.

SGLang is not among what the tests install (`make test-engines` installs it).
"""

from __future__ import annotations

import argparse
import itertools
import pkgutil
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

import absent_packages  # noqa: F401
from checkout import ROOT
from planned_kernels import planned_kernels
from sglang.srt.arg_groups import choices, overrides, speculative_hook
from sglang.srt.layers.attention import attention_registry as registry
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.draft_utils import DraftBackendFactory
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang_engine import CONTEXT, HEADS, SCALE, Engine, judged

from fa4_hd256.integrations.sglang import by_head_dim, checks, kernels, plugin
from fa4_hd256.integrations.sglang.backend import SGLangBackend, SGLangDraft
from fa4_hd256.models import Mask
from fa4_hd256.run.compile import counters

plugin.register()
HookRegistry.apply_hooks()

EXTEND, DECODE, VERIFY = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.TARGET_VERIFY

#: Decoding, a part of a prompt, a whole prompt: queries, and keys with those of the step.
MIXED = [1, 9, 20], [37, 41, 20]


@pytest.fixture
def engine(device):
    """A function that makes an `Engine`, which is closed after the test."""
    made = []

    def make(**options):
        made.append(Engine(device, **options))
        return made[-1]

    yield make
    for one in reversed(made):
        one.close()


@pytest.mark.parametrize(
    "layer_options, options",
    [({}, {}), ({"window": 11, "logit_cap": 30.0}, {"window_size": (11, 0), "softcap": 30.0})],
    ids=["plain", "Gemma 2"],
)
@pytest.mark.parametrize("page_size", [16, 1])
def test_a_mixed_step(engine, page_size, layer_options, options):
    """The layer writes new rows to the cache, then attends to all."""
    server = engine(requests=3, page_size=page_size, window=layer_options.get("window"))
    backend, layer = server.backend(), server.layer(**layer_options)
    assert type(backend) is SGLangBackend
    batch = server.batch(ForwardMode.MIXED, *MIXED)
    backend.init_forward_metadata(batch)
    before = [t.clone() for t in server.pool.get_kv_buffer(0)]
    q, k, v, out = server.attended(backend, layer, batch, sum(MIXED[0]))
    slots = batch.out_cache_loc
    for new, old, cache in zip((k, v), before, server.pool.get_kv_buffer(0)):
        assert torch.equal(cache[slots], new)
        others = torch.ones(len(cache), dtype=torch.bool, device=cache.device)
        others[slots] = False
        assert torch.equal(cache[others], old[others])
    server.accurate(q, out, *MIXED, causal=True, **options)


def test_decoding_with_sinks(engine):
    """Lengths are of the device alone; LSE is that of the keys."""
    server = engine()
    backend, layer = server.backend(), server.layer()
    batch = server.batch(DECODE, [1, 1], [37, 20], seq_lens_cpu=None)
    backend.init_forward_metadata(batch)
    sinks = torch.randn(HEADS, device=server.device)
    q, _, _, out = server.attended(backend, layer, batch, 2, sinks=sinks)
    server.accurate(q, out, [1, 1], [37, 20], causal=True, learnable_sink=sinks)
    q, _, _, (out, lse) = server.attended(backend, layer, batch, 2, return_lse=True)
    assert lse.shape == (2, HEADS)
    for request, keys in enumerate((37, 20)):
        k, v = server.cached(request, slice(keys))
        exact = judged(q[request : request + 1], k, v, out.view(2, HEADS, 256)[request][None],
                       softmax_scale=SCALE, causal=True)  # fmt: skip
        torch.testing.assert_close(lse[request].cpu(), exact.lse[0, :, 0].float())


def test_e4m3_with_scales(engine):
    """The layer's scales are those of all keys and of all values."""
    server = engine(cache_dtype=torch.float8_e4m3fn)
    backend, layer = server.backend(), server.layer()
    layer.k_scale, layer.v_scale = (
        torch.nn.Parameter(server.tensor(scale, torch.float32), requires_grad=False)
        for scale in (0.5, 2.0)
    )
    batch = server.batch(DECODE, [1, 1], [37, 20])
    backend.init_forward_metadata(batch)
    q, k, v, out = server.attended(backend, layer, batch, 2)
    scales = (0.5, 2.0)
    for request, last in enumerate((36, 19)):
        for new, cached in zip((k, v), server.cached(request, slice(last, last + 1), 0, scales)):
            # Three bits of mantissa.
            torch.testing.assert_close(cached[0, 0], new[request].double(), rtol=2**-4, atol=2**-6)
    server.accurate(q, out, [1, 1], [37, 20], scales=scales, causal=True)


def test_a_cache_of_windows(engine):
    """A layer with a window has pages of another cache, and writes there."""
    server = engine(window=11, has_window_cache=True)
    backend, batch = server.backend(), server.batch(EXTEND, [3, 20], [40, 20])
    backend.init_forward_metadata(batch)
    for layer_id, window in ((1, 11), (0, -1)):
        layer = server.layer(window, layer_id)
        q, k, _, out = server.attended(backend, layer, batch, 23)
        new = server.cached(0, slice(37, 40), layer_id)[0]
        assert torch.equal(new[0], k[:3])
        options = {"window_size": (11, 0)} if layer_id else {}
        server.accurate(q, out, [3, 20], [40, 20], layer_id, causal=True, **options)


#: Parents of the nodes of a tree: two branches, one of which forks.
PARENTS = [0, 0, 0, 1, 1, 2]
NODES = len(PARENTS)


def tree():
    seen = torch.eye(NODES, dtype=torch.bool)
    for node, parent in enumerate(PARENTS[1:], 1):
        seen[node] |= seen[parent]
    return seen


def verification(server, prefixes, mask):
    """Return a batch of `NODES` drafts of each request, and its keys."""
    keys = [count + NODES for count in prefixes]
    info = SimpleNamespace(
        custom_mask=mask, draft_token_num=NODES, positions=torch.zeros(NODES * len(keys)),
        ragged_verify_layout=None,
    )  # fmt: skip
    return server.batch(VERIFY, [NODES] * len(keys), keys, spec_info=info), keys


def whole_mask(prefixes, seen, device):
    """Return SGLang's FULL_MASK: of each node the keys before the tree, then the nodes."""
    rows = [torch.cat((torch.ones(NODES, count, dtype=torch.bool), seen), 1) for count in prefixes]
    return torch.cat([one.flatten() for one in rows]).to(device)


@pytest.mark.parametrize("mode", [TreeMaskMode.QLEN_ONLY, TreeMaskMode.FULL_MASK])
def test_a_tree_of_drafts_is_verified(engine, mode):
    """SGLang fills the backend's own mask, or passes one with the keys before the tree."""
    server = engine(speculative_eagle_topk=2, speculative_num_draft_tokens=NODES)
    backend, layer = server.backend(), server.layer()
    own, prefixes, seen = backend.verify_mask, [30, 17], tree()
    assert own.mode == TreeMaskMode.QLEN_ONLY and own.is_read and own.fits(2)
    if mode == TreeMaskMode.QLEN_ONLY:
        mask = own.buffer
        mask[: 2 * NODES**2] = seen.flatten().repeat(2).to(mask.device)
    else:
        mask = whole_mask(prefixes, seen, server.device)
    batch, keys = verification(server, prefixes, mask)
    backend.init_forward_metadata(batch)
    q, _, _, out = server.attended(backend, layer, batch, 2 * NODES)
    masks = [whole_mask([count], seen, "cpu").view(1, 1, NODES, -1) for count in prefixes]
    server.accurate(q, out, [NODES] * 2, keys, mask=masks)


@pytest.mark.parametrize("page_size", [16, 1])
def test_a_tree_in_a_layer_with_a_window(engine, page_size):
    """The window counts positions: depths in the tree, not a node's place among the drafts. A node
    has keys of its own, in pages of one row of the cache of windows."""
    window = 11
    server = engine(
        speculative_eagle_topk=2, speculative_num_draft_tokens=NODES, window=window,
        has_window_cache=True, page_size=page_size,
    )  # fmt: skip
    backend, prefixes, seen = server.backend(), [30, 4], tree()
    mask = whole_mask(prefixes, seen, server.device)
    batch, keys = verification(server, prefixes, mask)
    backend.init_forward_metadata(batch)
    depths = [int(row.sum()) - 1 for row in seen]
    for layer_id, width in ((1, window), (0, -1)):
        layer = server.layer(width, layer_id)
        q, _, _, out = server.attended(backend, layer, batch, 2 * NODES)
        masks = []
        for count in prefixes:
            one = whole_mask([count], seen, "cpu").view(NODES, -1)
            if layer_id:
                position = torch.tensor([*range(count), *(count + depth for depth in depths)])
                one &= position >= position[count:, None] - window
            masks.append(one[None, None])
        server.accurate(q, out, [NODES] * 2, keys, layer_id, mask=masks)
    wide = server.layer(window + 1, 1)
    with pytest.raises(ValueError, match="window of 13 keys and drafts are a tree"):
        server.attended(backend, wide, batch, 2 * NODES)


def test_a_chain_of_drafts_is_verified(engine):
    server = engine(speculative_eagle_topk=1, speculative_num_draft_tokens=NODES)
    backend, layer = server.backend(), server.layer()
    batch, keys = verification(server, [30, 17], None)
    backend.init_forward_metadata(batch)
    q, _, _, out = server.attended(backend, layer, batch, 2 * NODES)
    server.accurate(q, out, [NODES] * 2, keys, causal=True)
    batch.spec_info.ragged_verify_layout = object()
    with pytest.raises(NotImplementedError, match="drafts of different lengths"):
        backend.init_forward_metadata(batch)


def branch_positions(prefix, branch, steps, page_size):
    """Return where a branch's last page of the prefix begins, and where its drafts are."""
    rest = prefix % page_size
    pages = -(-(rest + steps) // page_size)
    begin = prefix - rest + branch * pages * page_size
    return begin, range(begin + rest, begin + rest + steps)


@pytest.mark.parametrize("page_size", [16, 1])
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
def test_branches_of_a_draft(engine, page_size, captured):
    """Each step of a draft attends to the prefix and to its own branch, over pages that SGLang
    lays out by branches; a replay reads the tensors of its capture."""
    branches, steps, prefixes = 2, 4, [30, 48]
    server = engine(
        speculative_eagle_topk=branches, speculative_num_steps=steps,
        speculative_num_draft_tokens=NODES, page_size=page_size,
    )  # fmt: skip
    server.runner.is_draft_worker = True
    draft = SGLangDraft(server.runner, branches, steps)
    assert len(draft.attn_backends) == steps - 1
    # An idle rank has no request.
    draft.init_forward_metadata(SimpleNamespace(batch_size=0))
    slots = torch.empty(2, branches, steps, dtype=torch.int64)
    table = server.runner.req_to_token_pool.req_to_token.cpu().long()
    caches = server.pool.get_kv_buffer(0)
    for request, prefix in enumerate(prefixes):
        for branch in range(branches):
            begin, places = branch_positions(prefix, branch, steps, server.page_size)
            own = table[request + 1]
            slots[request, branch] = own[list(places)]
            rest = prefix % server.page_size
            first = prefix - rest
            for cache in caches:
                cache[own[begin : begin + rest]] = cache[own[first : first + rest]]

    def batch_of(lengths):
        return server.batch(
            DECODE, [1, 1], lengths, spec_info=SimpleNamespace(is_draft_input=lambda: True),
            out_cache_loc=slots.flatten().to(server.device),
            positions=torch.zeros(2 * branches, dtype=torch.int64),
        )  # fmt: skip

    batch = batch_of(prefixes)
    if captured:
        draft.init_cuda_graph_state(4, 4 * branches)
        draft.init_forward_metadata_out_graph(batch_of([1, 1]), in_capture=True)
        first = [one.forward_metadata.page_table.data_ptr() for one in draft.attn_backends]
        draft.init_forward_metadata_out_graph(batch)
        again = [one.forward_metadata.page_table.data_ptr() for one in draft.attn_backends]
        assert first == again and len(set(first)) == 1
    else:
        draft.init_forward_metadata(batch)
    layer = server.layer()
    for step in range(steps - 1):
        batch.out_cache_loc = slots[:, :, step].flatten().to(server.device)
        q, _, _, out = server.attended(draft.attn_backends[step], layer, batch, 2 * branches)
        rows = iter(range(2 * branches))
        for request, prefix in enumerate(prefixes):
            for branch in range(branches):
                _, places = branch_positions(prefix, branch, steps, server.page_size)
                k, v = server.cached(request, [*range(prefix), *places[: step + 1]])
                row = next(rows)
                judged(q[row][None], k, v, out.view(-1, HEADS, 256)[row][None],
                       softmax_scale=SCALE)  # fmt: skip


def test_replays_of_a_graph(engine):
    """A replay fills the tensors of the capture; requests of padding write to slot 0."""
    server = engine(requests=3, window=11, has_window_cache=True)
    backend, layers = server.backend(), (server.layer(), server.layer(11, 1))
    backend.init_cuda_graph_state(4, 4)
    fill = backend.get_cuda_graph_seq_len_fill_value()
    captured = server.batch(DECODE, [1] * 3, [fill] * 3)
    backend.init_forward_metadata_out_graph(captured, in_capture=True)
    step = backend.forward_metadata
    addresses = {name: tensor.data_ptr() for name, tensor in step.tensors().items()}
    keys = [37, 41, 20]
    batch = server.batch(DECODE, [1] * 3, keys)
    # SGLang's view of a padded batch has the slots of its real rows alone.
    slots, batch.out_cache_loc = batch.out_cache_loc, batch.out_cache_loc[:2]
    backend.init_forward_metadata_out_graph(batch)
    assert backend.forward_metadata is step
    assert addresses == {name: tensor.data_ptr() for name, tensor in step.tensors().items()}
    assert step.max_seqlen_k == CONTEXT and step.window_slots.tolist()[2] == 0
    batch.out_cache_loc = slots
    for layer in layers:
        q, _, _, out = server.attended(backend, layer, batch, 3)
        options = {"window_size": (11, 0)} if layer.layer_id else {}
        if layer.layer_id:
            # The third row was written to slot 0: its key of before is what is seen.
            q, out = q[:2], out[:2]
        count = len(q)
        server.accurate(q, out, [1] * count, keys[:count], layer.layer_id, causal=True, **options)


@pytest.mark.parametrize("page_size", [16, 1])
def test_interleaved_replays(engine, page_size):
    """Graphs share tensors: a replay has its step's values, whichever was replayed before."""
    options = {"speculative_eagle_topk": 1, "speculative_num_draft_tokens": NODES}
    server = engine(page_size=page_size, window=11, has_window_cache=True, **options)
    backend = server.backend()
    backend.init_cuda_graph_state(4, 4 * NODES)
    for keys in ([7, 7], [37, 41], [41, 20], [112, 7]):
        drafts, _ = verification(server, [count - NODES for count in keys], None)
        for batch in (drafts, server.batch(DECODE, [1, 1], keys)):
            backend.init_forward_metadata_out_graph(batch, in_capture=keys == [7, 7])
            found = backend.forward_metadata.tensors()
            backend.init_forward_metadata(batch)
            for name, tensor in backend.forward_metadata.tensors().items():
                assert torch.equal(found[name][..., : tensor.shape[-1]], tensor), name


@pytest.mark.cuda
def test_a_captured_graph(engine):
    """One graph serves other requests and lengths than those of its capture."""
    server = engine(requests=3, window=11, has_window_cache=True)
    backend, layers = server.backend(), (server.layer(), server.layer(11, 1))
    backend.init_cuda_graph_state(4, 4)
    batch = server.batch(DECODE, [1] * 3, [1] * 3)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    rows = [torch.randn(3, heads, 256, device=server.device).to(torch.bfloat16)
            for heads in (HEADS, HEADS // 2, HEADS // 2)]  # fmt: skip

    def step():
        with forward_context(ForwardContext(attn_backend=backend)):
            return [layer(*(t.flatten(1) for t in rows), batch) for layer in layers]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for keys in ([37, 41, 20], [128, 1, 64]):
        now = server.batch(DECODE, [1] * 3, keys)
        backend.init_forward_metadata_out_graph(now)
        batch.out_cache_loc.copy_(now.out_cache_loc)
        graph.replay()
        for layer, out in zip(layers, results):
            options = {"window_size": (11, 0)} if layer.layer_id else {}
            server.accurate(rows[0], out, [1] * 3, keys, layer.layer_id, causal=True, **options)


def test_blocks_of_a_diffusion_model(engine):
    """Rows of a block see each other and the same keys before it, in a layer with a window the
    window's last ones."""
    block, window, keys = 16, 20, [40, 16]
    server = engine(window=window)
    backend = server.backend()
    batch = server.batch(ForwardMode.DLLM_EXTEND, [block] * 2, keys)
    backend.init_forward_metadata(batch)
    for width in (-1, window):
        layer = server.layer(width, attn_type=AttentionType.DECODER_BIDIRECTIONAL)
        q, _, _, out = server.attended(backend, layer, batch, 2 * block)
        for request, count in enumerate(keys):
            before = count - block if width < 0 else min(count - block, width)
            k, v = server.cached(request, slice(count - block - before, count))
            rows = slice(request * block, (request + 1) * block)
            judged(q[rows], k, v, out.view(-1, HEADS, 256)[rows], softmax_scale=SCALE)
    layer = server.layer(5, attn_type=AttentionType.DECODER_BIDIRECTIONAL)
    with pytest.raises(ValueError, match="window of 6 keys; accepted in a diffusion model: 21"):
        server.attended(backend, layer, batch, 2 * block)


@pytest.mark.parametrize("window", [-1, 20])
def test_images_of_a_prompt(engine, window):
    """Rows of an image see all of its rows, if the step has them all; others those before them."""
    server = engine(window=None if window < 0 else window)
    server.runner.model.prepare_attn_masks = None
    backend, layer = server.backend(), server.layer(window)
    queries, keys = [20, 20], [40, 20]
    items = [SimpleNamespace(is_image=lambda: True, offsets=[(24, 33), (15, 22)]),
             SimpleNamespace(is_image=lambda: False, offsets=[(36, 38)])]  # fmt: skip
    inputs = [SimpleNamespace(mm_items=items), None]
    batch = server.batch(EXTEND, queries, keys, mm_inputs=inputs)
    backend.init_forward_metadata(batch)
    q, _, _, out = server.attended(backend, layer, batch, 40)
    masks = []
    for request, (count, end) in enumerate(zip(queries, keys)):
        row, key = torch.arange(end - count, end)[:, None], torch.arange(end)
        seen = key <= row
        if request == 0:
            seen |= (row >= 24) & (row <= 33) & (key >= 24) & (key <= 33)
        if window >= 0:
            seen &= key >= row - window
        masks.append(seen[None, None])
    server.accurate(q, out, queries, keys, mask=masks)


#: Steps: queries and keys of requests.
STEPS = [
    ([1], [5]), ([1] * 40, [600] * 40), ([2, 2], [900, 30]), ([3] * 7, [1024] * 7), ([4], [1024]),
    ([16], [400]), ([17, 1], [17, 1024]), ([1, 1, 9, 300], [37, 1024, 41, 300]), ([500], [1000]),
    ([1, 64], [2, 64]), ([33, 5], [700, 800]), ([1000], [1000]), ([8] * 12, [777] * 12),
]  # fmt: skip
#: Options of layers, of the server, and of the model.
KINDS = {
    "plain": ({}, {}), "Gemma 2": ({"window": 512, "logit_cap": 50.0}, {"window": 512}),
    "sinks": ({}, {}), "blocks": ({"window": 20, "attn_type": AttentionType.DECODER_BIDIRECTIONAL},
    {"window": 20}), "e4m3": ({}, {"cache_dtype": torch.float8_e4m3fn}),
    "deterministic": ({}, {"enable_deterministic_inference": True}),
    "images": ({"window": 512}, {"window": 512}),
    "tree": ({}, {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": NODES}),
    "tree and window": ({"window": 512},
                        {"window": 512, "speculative_eagle_topk": 2,
                         "speculative_num_draft_tokens": NODES}),
}  # fmt: skip


def run_steps(server, backend, layer, kind):
    """Run the steps of `STEPS` in the modes that a server has."""
    for queries, keys in STEPS:
        is_decoding = set(queries) == {1}
        mode = ForwardMode.DLLM_EXTEND if kind == "blocks" else DECODE if is_decoding else EXTEND
        batch = server.batch(mode, queries, keys)
        if kind == "images":
            item = SimpleNamespace(is_image=lambda: True, offsets=[(keys[0] - 12, keys[0] - 3)])
            batch.mm_inputs = [SimpleNamespace(mm_items=[item])] + [None] * (len(keys) - 1)
        backend.init_forward_metadata(batch)
        sinks = torch.zeros(HEADS, device=server.device)
        options = {"sinks": sinks} if kind == "sinks" else {}
        server.attended(backend, layer, batch, sum(queries), **options)
    if kind.startswith("tree"):
        for prefixes in ([5], [900, 30], [600] * 20):
            mask = whole_mask(prefixes, tree(), server.device)
            batch = verification(server, prefixes, mask)[0]
            backend.init_forward_metadata(batch)
            server.attended(backend, layer, batch, NODES * len(prefixes))


def server_of(engine, kind):
    """Return an engine whose model has the kind's layer, and that layer."""
    layer_options, server_options = KINDS[kind]
    server = engine(requests=40, context=1024, **server_options)
    model = server.runner.model
    model.layer = layer = server.layer(**layer_options)
    if kind == "sinks":
        model.register_parameter("sinks", torch.nn.Parameter(torch.zeros(HEADS)))
    if kind == "images":
        model.prepare_attn_masks = None
    if kind == "e4m3":
        layer.k_scale = layer.v_scale = server.tensor(0.5, torch.float32)
    return server, layer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheduler", ["0", "1", None], ids=["static", "dynamic", "by rule"])
def test_kernels_of_steps_are_known_before(engine, monkeypatch, kind, scheduler):
    """Every kernel of varied steps is among those that are loaded with the model."""
    monkeypatch.delenv("FA_CLC", raising=False)
    if scheduler is not None:
        monkeypatch.setenv("FA_CLC", scheduler)
    server, layer = server_of(engine, kind)
    backend = SGLangBackend(server.runner)
    with planned_kernels(monkeypatch) as found:
        run_steps(server, backend, layer, kind)
    known = set(kernels.kernels_of_layers(server.runner))
    assert len(found) > 2
    assert found <= known, found - known


@pytest.mark.cuda
@pytest.mark.parametrize("kind", KINDS)
def test_no_step_compiles_anything(engine, kind):
    """On a GPU, after the model has been loaded."""
    server, layer = server_of(engine, kind)
    backend = server.backend()
    before = counters["compiled"]
    run_steps(server, backend, layer, kind)
    assert counters["compiled"] == before


def test_an_encoder(engine):
    """Queries see keys on both sides, within the window."""
    server = engine(window=5)
    backend = server.backend()
    batch = server.batch(EXTEND, [9, 20], [9, 20])
    backend.init_forward_metadata(batch)
    layer = server.layer(5, attn_type=AttentionType.ENCODER_ONLY)
    q, _, _, out = server.attended(backend, layer, batch, 29)
    server.accurate(q, out, [9, 20], [9, 20], window_size=(5, 5))


def test_deterministic_inference_has_one_bound_of_keys(engine):
    server = engine(enable_deterministic_inference=True)
    backend = server.backend()
    assert backend.batch_invariant
    for keys in ([37, 20], [5, 6]):
        backend.init_forward_metadata(server.batch(DECODE, [1, 1], keys))
        assert backend.forward_metadata.max_seqlen_k == CONTEXT


def test_sglang_has_the_name(engine):
    for names in (
        registry.ATTENTION_BACKENDS, registry.HYBRID_GDN_SM100_BACKENDS,
        choices.ATTENTION_BACKEND_CHOICES, choices.DRAFT_ATTENTION_BACKEND_CHOICES,
        choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
    ):  # fmt: skip
        assert plugin.NAME in names
    plugin.register()
    assert choices.ATTENTION_BACKEND_CHOICES.count(plugin.NAME) == 1


def test_the_entry_point():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    found = project["entry-points"]["sglang.srt.plugins"]
    assert [pkgutil.resolve_name(target) for target in found.values()] == [plugin.register]


def test_the_command_line_takes_the_name():
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    options = ["--attention-backend", "--speculative-draft-attention-backend"]
    found = parser.parse_args(
        ["--model-path", "none", *itertools.chain(*((name, plugin.NAME) for name in options))]
    )
    assert found.attention_backend == found.speculative_draft_attention_backend == plugin.NAME


def test_trees_of_drafts_take_pages_of_several_rows(monkeypatch):
    """SGLang's check of its own list lets the name through, and no other that is not in it."""
    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]))
    monkeypatch.setattr(speculative_hook, "model_config_of", lambda _: config)
    given = {
        "model_path": "none", "page_size": 64, "speculative_algorithm": "EAGLE",
        "speculative_eagle_topk": 2, "speculative_num_steps": 3,
        "speculative_num_draft_tokens": NODES,
    }  # fmt: skip
    speculative_hook._handle_eagle_family(ServerArgs(attention_backend=plugin.NAME, **given))
    other = ServerArgs(attention_backend="flashmla", **given)
    with pytest.raises(ValueError, match="got attention_backend='flashmla'"):
        speculative_hook._handle_eagle_family(other)
    # Only that check.
    given["max_running_requests"] = None
    wrong = ServerArgs(attention_backend=plugin.NAME, **given | {"dp_size": 2})
    monkeypatch.setattr(speculative_hook, "attn_dp_enabled_of", lambda _: True)
    wrong.speculative_algorithm = "STANDALONE"
    with pytest.raises(ValueError, match="does not support dp attention"):
        speculative_hook._handle_eagle_family(wrong)


def test_a_diffusion_algorithm_takes_the_name():
    """An algorithm for SGLang's fa4 takes ours, too; any other name becomes its own choice."""
    names = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    view = SimpleNamespace(dllm_algorithm="Gemma4Renoise", **dict.fromkeys(names))
    view.attention_backend = plugin.NAME
    assert overrides._dllm_attention_backend(view) == {}
    view.attention_backend = "flashinfer"
    assert overrides._dllm_attention_backend(view)["attention_backend"] == "triton"
    view.dllm_algorithm = None
    assert overrides._dllm_attention_backend(view) == {}


def test_drafts_have_the_backend(engine):
    """SGLang's factory of drafts makes one backend for steps and one for rows after them."""
    server = engine(speculative_eagle_topk=2, speculative_num_steps=3)
    server.runner.draft_attention_backend = plugin.NAME
    server.runner.is_draft_worker = True
    factory = DraftBackendFactory(server.runner, 2, 3)
    steps, rows = factory.create_decode_backend(), factory.create_draft_extend_backend()
    assert type(steps) is SGLangDraft and type(rows) is SGLangBackend
    assert rows.prefill_attention_backend_str == plugin.NAME
    assert {one.decode_attention_backend_str for one in steps.attn_backends} == {plugin.NAME}
    server.runner.model.full = server.layer(head_dim=128)
    with pytest.raises(ValueError, match=r"the draft's layers have head_dim \[\(128, 128\)\]"):
        factory.create_decode_backend()
    server.runner.draft_attention_backend = "no such name"
    with pytest.raises(ValueError, match="EAGLE is not supported"):
        DraftBackendFactory(server.runner, 2, 3).create_decode_backend()


def test_layers_of_another_head_dim(engine, monkeypatch):
    """SGLang's own backend keeps them, and both write the same cache; a model without layers of
    ours is refused."""
    monkeypatch.setattr(by_head_dim, "OTHERS", "torch_native")
    server = engine()
    model, config = server.runner.model, server.runner.model_config
    model.full, model.local = server.layer(head_dim=512), server.layer()
    backend = server.backend()
    assert backend.prefill_backend is backend.others
    other = registry.ATTENTION_BACKENDS["torch_native"](server.runner)
    assert type(backend.others) is type(other)
    batch = server.batch(EXTEND, [3, 20], [40, 20])
    backend.init_forward_metadata(batch)
    layer = server.layer()
    assert backend.of_layer(layer) is backend.ours
    assert backend.of_layer(server.layer(head_dim=512)) is backend.others
    q, k, v, out = server.attended(backend, layer, batch, 23)
    server.accurate(q, out, [3, 20], [40, 20], causal=True)
    del model.local
    with pytest.raises(ValueError, match=r"layers have head_dim \[\(512, 512\)\]"):
        server.backend()
    # A rank without a layer of attention.
    del model.full
    config.is_hybrid_swa, config.head_dim, config.v_head_dim = True, 512, 512
    config.swa_head_dim = config.swa_v_head_dim = 128
    with pytest.raises(ValueError, match=r"layers have head_dim \[\(128, 128\), \(512, 512\)\]"):
        server.backend()


def test_kernels_that_are_loaded_with_a_model(engine):
    """One description for layers of the same heads: masks, sinks, cache and pages of the model."""
    server = engine(
        cache_dtype=torch.float8_e4m3fn, speculative_eagle_topk=2, speculative_num_draft_tokens=4
    )
    model = server.runner.model
    model.layers = torch.nn.ModuleList(
        [server.layer(), server.layer(11), server.layer(11), server.layer(head_dim=512)]
    )
    model.register_parameter("sinks", torch.nn.Parameter(torch.zeros(HEADS)))
    (kind,) = kernels.kinds_of_layers(server.runner)
    assert set(kind.masks) == {Mask(True), Mask(True, (11, None))}
    assert (kind.heads_q, kind.heads_kv, kind.sink) == (HEADS, HEADS // 2, True)
    needs = kernels.needs_of(server.runner)
    assert needs.page_sizes == (16, 1) and needs.kv_dtypes == (torch.float8_e4m3fn,)
    assert needs.tree_mask and not needs.batch_invariant
    model.layers.append(server.layer(logit_cap=30.0))
    assert [kind.softcap for kind in kernels.kinds_of_layers(server.runner)] == [0, 30]


def test_wrappers_of_sglang(engine):
    """The wrappers of hybrid models and of two backends hand steps and layers on."""
    server = engine()
    ours = server.backend()
    linear = SimpleNamespace(
        needs_cpu_seq_lens=False, supports_prefill_graph_extend=lambda: False,
        init_forward_metadata=lambda batch: None, supports_ragged_verify_graph=False,
    )  # fmt: skip
    hybrid = HybridLinearAttnBackend(ours, linear, [0])
    assert hybrid.token_to_kv_pool is server.pool and not hybrid.needs_cpu_seq_lens
    both = HybridAttnBackend(server.runner, server.backend(), server.backend())
    for backend in (hybrid, both):
        batch = server.batch(EXTEND, [3, 20], [40, 20])
        backend.init_forward_metadata(batch)
        q, _, _, out = server.attended(backend, server.layer(), batch, 23)
        server.accurate(q, out, [3, 20], [40, 20], causal=True)


def test_refusals(engine, monkeypatch):
    server = engine(window=5, speculative_eagle_topk=2, speculative_num_draft_tokens=65)
    for name, value, error, words in (
        ("use_mla_backend", True, NotImplementedError, "a model with MLA is not offered"),
        ("dtype", torch.float32, ValueError, "dtype is torch.float32"),
        ("kv_cache_dtype", torch.float8_e5m2, ValueError, "auto or fp8_e4m3"),
    ):
        with monkeypatch.context() as patch, pytest.raises(error, match=words):
            patch.setattr(server.runner, name, value)
            server.backend()
    with pytest.raises(ValueError, match="speculative_num_draft_tokens is 65"):
        server.backend()
    monkeypatch.setenv("SGLANG_ENABLE_METADATA_GLUE_GRAPH", "1")
    with pytest.raises(NotImplementedError, match="SGLANG_ENABLE_METADATA_GLUE_GRAPH is not"):
        engine().backend()


def test_layers_that_are_refused(engine):
    server = engine()
    backend, batch = server.backend(), server.batch(DECODE, [1, 1], [37, 20])
    backend.init_forward_metadata(batch)
    for options, error, words in (
        ({"head_dim": 128}, ValueError, r"layer 0 has head_dim \(128, 128\)"),
        ({"use_irope": True}, NotImplementedError, "use_irope True"),
        ({"is_cross_attention": True}, NotImplementedError, "is_cross_attention True"),
    ):
        with pytest.raises(error, match=words):
            checks.check_layer(server.layer(**options))
    server.runner.model.attention = server.layer(use_irope=True)
    with pytest.raises(NotImplementedError, match="layer 0 has use_irope True"):
        server.backend()
    q = torch.zeros(2, HEADS * 256, dtype=torch.bfloat16, device=server.device)
    with (
        forward_context(ForwardContext(attn_backend=backend)),
        pytest.raises(NotImplementedError, match="q_rope is given; accepted: sinks"),
    ):
        backend.forward(q, None, None, server.layer(), batch, q_rope=q)
