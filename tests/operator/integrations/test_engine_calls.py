"""The calls of vLLM's and SGLang's flash-attention backends, argument by argument.

Each call site's list of names is what the published source passes; the values are as the engine
makes them. Where an engine is installed, its source is read and the lists are compared with it.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import re
from pathlib import Path

import pytest
import torch
from checkout import ROOT

from fa4_hd256 import get_scheduler_metadata, interface
from fa4_hd256.check import reference
from fa4_hd256.compat import arguments
from fa4_hd256.integrations import sglang, vllm
from fa4_hd256.integrations.engines import our_options
from fa4_hd256.score_mods import alibi

LSE_TOLERANCE = 1e-3
#: Arguments of vLLM's that are None where they say nothing to ours.
DROPPED = "k_descale", "v_descale", "scheduler_metadata", "score_mod", "deterministic"
PAGE = 16

#: Call sites of vLLM 0.33.0.
VLLM_MODULE = "vllm.v1.attention.backends.flash_attn"
VLLM = {
    "cache": """q k v out cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k softmax_scale causal
        alibi_slopes window_size block_table softcap scheduler_metadata fa_version q_descale
        k_descale v_descale dynamic_causal num_splits s_aux mask_mod aux_tensors""",
    "context of a rank": """q k v out cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k
        softmax_scale causal alibi_slopes window_size block_table softcap return_softmax_lse
        scheduler_metadata fa_version q_descale k_descale v_descale num_splits""",
    "new keys of a rank": """q k v out cu_seqlens_q max_seqlen_q cu_seqlens_k max_seqlen_k
        softmax_scale causal alibi_slopes window_size softcap return_softmax_lse fa_version
        q_descale k_descale v_descale num_splits""",
    "encoder": """q k v out cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k softmax_scale causal
        alibi_slopes window_size softcap fa_version q_descale k_descale v_descale num_splits
        s_aux""",
}

#: Call sites of SGLang 0.5.23; "**": sinks, k_descale, v_descale, max_seqlen_k and others that are
#: not offered, where it has them. Calls with qv (MLA) are left out.
SGLANG_MODULE = "sglang.srt.layers.attention.flashattention_backend"
SGLANG = {
    "extend": """q k_cache v_cache page_table cache_seqlens cu_seqlens_q cu_seqlens_k_new
        max_seqlen_q softmax_scale causal window_size softcap return_softmax_lse num_splits out ver
        **""",
    "parts of a prompt, drafts": """q k_cache v_cache page_table cache_seqlens cu_seqlens_q
        cu_seqlens_k_new max_seqlen_q softmax_scale causal window_size softcap return_softmax_lse
        num_splits ver **""",
    "decode": """q k_cache v_cache page_table cache_seqlens cu_seqlens_q max_seqlen_q softmax_scale
        causal window_size softcap return_softmax_lse num_splits out ver scheduler_metadata **""",
    "cross-attention, chunks": """q k_cache v_cache page_table cache_seqlens cu_seqlens_q
        cu_seqlens_k_new max_seqlen_q softmax_scale causal window_size softcap num_splits ver **""",
    "without a cache": """q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k softmax_scale
        causal window_size softcap num_splits out **""",
    "parts of a prefix": """q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k softmax_scale
        causal return_softmax_lse out ver **""",
}


def names_of(call):
    return [name for name in call.split() if name != "**"]


def int32(numbers, device):
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def offsets(counts, device):
    return int32([0, *itertools.accumulate(counts)], device)


class Batch:
    """Requests in the middle of their work: of each so many queries, the last of so many keys."""

    def __init__(self, device, queries, keys, heads=4, heads_kv=2):
        self.device, self.queries, self.keys = device, queries, keys
        self.pages = [-(-count // PAGE) for count in keys]
        # Both engines leave a page for what is padded, and give tables more columns than pages.
        numbers = iter((torch.randperm(sum(self.pages)) + 1).tolist())
        self.table = torch.zeros(len(keys), max(self.pages) + 2, dtype=torch.int32)
        for row, count in enumerate(self.pages):
            self.table[row, :count] = int32([next(numbers) for _ in range(count)], "cpu")
        self.table = self.table.to(device)
        self.heads_kv = heads_kv
        self.q = torch.randn(sum(queries), heads, 256).to(device, torch.bfloat16)
        self.out = torch.full_like(self.q, torch.nan)

    def both(self, *shape):
        return torch.randn(*shape).to(self.device, torch.bfloat16)

    def values(self):
        """Return the arguments that engines pass under the same names."""
        device = self.device
        return {
            "q": self.q, "out": self.out, "cu_seqlens_q": offsets(self.queries, device),
            "max_seqlen_q": max(self.queries), "max_seqlen_k": max(self.keys),
            "softmax_scale": 256**-0.5, "causal": True, "num_splits": 0,
            "scheduler_metadata": None, "return_softmax_lse": False,
        }  # fmt: skip

    def accurate(self, got, k_cache, v_cache, lse=None, **options):
        """got: (total, heads, 256) of keys in pages, against float64."""
        ends = offsets(self.queries, "cpu").tolist()
        for row, count in enumerate(self.keys):
            rows = slice(ends[row], ends[row + 1])
            pages = self.table[row, : self.pages[row]].long()
            keys = (cache[pages].flatten(0, 1)[None, :count] for cache in (k_cache, v_cache))
            tensors = self.q[None, rows], *keys
            exact = reference.Expected.of(tensors, **options)
            of_lse = exact.lse.float() if lse is None else lse[None, :, rows]
            found = exact.compare(got[None, rows], of_lse)
            assert found.max_error <= found.tolerance, found
            assert found.lse_max_error <= LSE_TOLERANCE, found

    def accurate_packed(self, got, k, v, counts, lse=None, **options):
        """Check results of packed keys, so many of each request."""
        places = zip(self.q.split(self.queries), k.split(counts), v.split(counts),
                     got.split(self.queries), strict=True)  # fmt: skip
        lses = [None] * len(counts) if lse is None else lse.split(self.queries, dim=1)
        for (q, keys, values, out), of_lse in zip(places, lses):
            exact = reference.Expected.of((q[None], keys[None], values[None]), **options)
            found = exact.compare(out[None], exact.lse.float() if of_lse is None else of_lse[None])
            assert found.max_error <= found.tolerance, found
            assert found.lse_max_error <= LSE_TOLERANCE, found


def vllm_cache(batch):
    """Keys and values beside each other in a row, heads before rows, as vLLM views them."""
    whole = batch.both(sum(batch.pages) + 1, batch.heads_kv, PAGE, 512)
    return whole.transpose(1, 2).split(256, dim=-1)


def vllm_values(batch):
    # Scales are there for caches of any kind.
    scale = torch.ones((), device=batch.device).expand(len(batch.keys), batch.heads_kv)
    return batch.values() | {
        "alibi_slopes": None, "window_size": [-1, -1], "softcap": 0, "fa_version": 4,
        "q_descale": None, "k_descale": scale, "v_descale": scale, "dynamic_causal": None,
        "s_aux": None, "mask_mod": None, "aux_tensors": None, "block_table": batch.table,
        "seqused_k": int32(batch.keys, batch.device),
    }  # fmt: skip


#: Requests: a decoding step, a part of a prompt, a whole prompt.
MIXED = [1, 9, 20], [37, 41, 20]


@pytest.mark.parametrize(
    ("changed", "options"),
    [
        ({}, {}),
        ({"window_size": [11, 0], "softcap": 30.0}, {"window_size": (11, 0), "softcap": 30.0}),
        ({"num_splits": 32, "fa_version": 3}, {}),
    ],
    ids=["plain", "Gemma 2", "graphs of FA3"],
)
@pytest.mark.sampled("plain")
def test_vllm_with_its_cache(device, changed, options):
    batch = Batch(device, *MIXED)
    k, v = vllm_cache(batch)
    values = vllm_values(batch) | changed | {"k": k, "v": v}
    got = vllm.flash_attn_varlen_func(**{n: values[n] for n in names_of(VLLM["cache"])})
    assert got.data_ptr() == batch.out.data_ptr()
    batch.accurate(batch.out, k, v, causal=True, **options)


def slopes_of(heads, device):
    return torch.tensor([2.0 ** -(1 + n) for n in range(heads)], device=device)


def test_vllm_with_wrong_slopes():
    batch = Batch("cpu", [1], [4])
    k, v = vllm_cache(batch)
    values = vllm_values(batch) | {"k": k, "v": v, "alibi_slopes": [0.5] * 4}
    with pytest.raises(TypeError, match="slopes is list; accepted: a float32 tensor"):
        vllm.flash_attn_varlen_func(**{n: values[n] for n in names_of(VLLM["cache"])})
    values |= {"alibi_slopes": slopes_of(4, "cpu"), "softcap": 30.0}
    with pytest.raises(ValueError, match="softcap is 30.0 with a score_mod"):
        vllm.flash_attn_varlen_func(**{n: values[n] for n in names_of(VLLM["cache"])})


def sglang_cache(batch):
    """A pool of rows for each of keys and values, viewed as pages."""
    rows = (sum(batch.pages) + 1) * PAGE
    return [batch.both(rows, batch.heads_kv, 256).view(-1, PAGE, batch.heads_kv, 256) for _ in "kv"]


def sglang_values(batch):
    return batch.values() | {
        "window_size": (-1, -1), "softcap": 0.0, "ver": 3, "page_table": batch.table,
        "cache_seqlens": int32(batch.keys, batch.device),
        "cu_seqlens_k_new": offsets(batch.keys, batch.device),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("site", "requests", "changed", "others"),
    [
        ("extend", MIXED, {}, {}),
        ("extend", MIXED, {"window_size": (11, 0)}, {"sinks": True, "aux_tensors": None}),
        ("decode", ([1, 1, 1], [5, 37, 16]), {"scheduler_metadata": True}, {"max_seqlen_k": 37}),
        ("cross-attention, chunks", ([1, 1], [16, 30]), {"causal": False}, {}),
    ],
    ids=["extend", "sliding window", "decode", "cross-attention"],
)  # fmt: skip
@pytest.mark.sampled("extend")
def test_sglang_with_its_cache(device, site, requests, changed, others):
    batch = Batch(device, *requests)
    k_cache, v_cache = sglang_cache(batch)
    values = sglang_values(batch) | changed | {"k_cache": k_cache, "v_cache": v_cache}
    if "scheduler_metadata" in changed:
        values["scheduler_metadata"] = torch.zeros(4, dtype=torch.int32, device=device)
    options = {name: values[name] for name in ("causal", "window_size")}
    if "sinks" in others:
        others = others | {"sinks": torch.randn(4).to(device)}
        options["learnable_sink"] = others["sinks"]
    names = names_of(SGLANG[site])
    got = sglang.flash_attn_with_kvcache(**{n: values[n] for n in names}, **others)
    assert ("out" in names) == (got.data_ptr() == batch.out.data_ptr())
    batch.accurate(got, k_cache, v_cache, **options)


@pytest.mark.parametrize("engine", [vllm, sglang], ids=["vllm", "sglang"])
def test_a_list_of_parts_is_honoured(engine, device, monkeypatch):
    """Our own metadata is used; a plan of another kernel under the same name, and a copy of ours,
    have no effect."""
    seen = []

    def attend(*_, **options):
        seen.append(options.get("scheduler_metadata"))
        return None

    module, name = {
        vllm: (interface, "flash_attn_varlen_func"),
        sglang: (sglang.functions.kv_cache, "flash_attn_with_kvcache"),
    }[engine]
    monkeypatch.setattr(module, name, attend)
    listed = get_scheduler_metadata(int32([600, 20], device), 1, 640, 4, 2)
    for given in (listed, torch.zeros(4, dtype=torch.int32, device=device), listed.clone(), None):
        if engine is vllm:
            vllm.flash_attn_varlen_func(
                None, None, None, 1, None, 640, scheduler_metadata=given, num_splits=0
            )
        else:
            sglang.flash_attn_with_kvcache(None, None, None, scheduler_metadata=given)
    assert seen[0] is listed and seen[1:] == [None] * 3


def test_sglang_does_not_divide_keys_but_by_a_list(device, monkeypatch):
    """One split is its default, which scheduler metadata, refused beside `num_splits`, replaces."""
    seen = []
    monkeypatch.setattr(
        sglang.functions.interface,
        "flash_attn_varlen_func",
        lambda *_, **options: seen.append(options),
    )
    listed = get_scheduler_metadata(int32([600, 20], device), 1, 640, 4, 2)
    for given in (listed, listed.clone(), None):
        sglang.flash_attn_varlen_func(
            None, None, None, None, None, 1, 640, scheduler_metadata=given
        )  # fmt: skip
    assert all(options.pop("return_lse") is False for options in seen)
    seen = [
        {name: given for name, given in options.items() if "seqlen" not in name} for options in seen
    ]
    assert seen == [{"scheduler_metadata": listed}, {"num_splits": 1}, {"num_splits": 1}]


def three_calls(batch):
    """Functions of both engines with `out`: vLLM's, SGLang's with a cache and without."""
    k, v = vllm_cache(batch)
    values = vllm_values(batch) | {"k": k, "v": v}
    yield vllm.flash_attn_varlen_func, {n: values[n] for n in names_of(VLLM["cache"])}
    k, v = sglang_cache(batch)
    values = sglang_values(batch) | {"k_cache": k, "v_cache": v}
    yield sglang.flash_attn_with_kvcache, {n: values[n] for n in names_of(SGLANG["extend"])}
    k, v = (batch.both(sum(batch.keys), batch.heads_kv, 256) for _ in "kv")
    values |= {"k": k, "v": v, "cu_seqlens_k": offsets(batch.keys, batch.device)}
    yield sglang.flash_attn_varlen_func, {n: values[n] for n in names_of(SGLANG["without a cache"])}


@pytest.fixture
def handed_on(monkeypatch):
    """Arguments of the calls that engines' functions make of ours, by name; nothing is computed."""
    calls = []

    def function(of, names):
        def call(*tensors, return_lse, **options):
            calls.append((of, dict(zip(names, tensors, strict=True)) | options))
            out = torch.ones_like(tensors[0]) if options.get("out") is None else options["out"]
            return (out, "lse") if return_lse else out

        return call

    packed, cache = "flash_attn_varlen_func", "flash_attn_with_kvcache"
    monkeypatch.setattr(f"fa4_hd256.interface.{packed}", function(packed, "qkv"))
    names = "q", "k_cache", "v_cache"
    monkeypatch.setattr(f"fa4_hd256.kv_cache.{cache}", function(cache, names))
    return calls


def same(found, expected):
    """Compare arguments: tensors by identity."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        is_tensor = isinstance(value, torch.Tensor)
        assert found[name] is value if is_tensor else found[name] == value, name


@pytest.mark.parametrize("site", VLLM)
def test_what_vllm_hands_on(site, handed_on):
    """Each call site's arguments, under our names."""
    batch, sink = Batch("cpu", [1, 5], [18, 40]), torch.randn(4)
    k, v = vllm_cache(batch)
    values = vllm_values(batch) | {
        "k": k, "v": v, "cu_seqlens_k": offsets(batch.keys, "cpu"), "causal": site != "encoder",
        "window_size": [3, 0], "softcap": 30.0, "num_splits": 7, "s_aux": sink,
        "return_softmax_lse": True,
    }  # fmt: skip
    names = names_of(VLLM[site])
    got = vllm.flash_attn_varlen_func(**{n: values[n] for n in names})
    assert got == (batch.out, "lse") if "return_softmax_lse" in names else got is batch.out
    ((of, found),) = handed_on
    assert of == "flash_attn_varlen_func"
    ours = {"s_aux": "learnable_sink", "block_table": "page_table"}
    kept = "q", "k", "v", "out", "softmax_scale", "causal", "softcap", "num_splits"
    lengths = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_k"
    expected = {name: values[name] if name in names else None for name in lengths}
    expected |= {name: values[name] for name in kept}
    expected |= {own: values[name] for name, own in ours.items() if name in names}
    # A scheduler's plan of vLLM's says nothing to ours; scales are those of caches in e4m3 alone.
    dropped = {name: found.pop(name) for name in (*DROPPED, "window_size") if name in found}
    assert tuple(dropped.pop("window_size")) == (3, 0) and set(dropped.values()) <= {None}
    same(found, expected)


def test_what_vllm_hands_on_of_alibi(handed_on):
    batch, slopes = Batch("cpu", [1], [4]), slopes_of(4, "cpu")
    k, v = vllm_cache(batch)
    values = vllm_values(batch) | {"k": k, "v": v, "alibi_slopes": slopes, "window_size": None}
    vllm.flash_attn_varlen_func(**{n: values[n] for n in names_of(VLLM["cache"])})
    ((_, found),) = handed_on
    assert found["score_mod"].key == alibi(slopes).key
    assert found["score_mod"].tensors[0] is slopes and "window_size" not in found


@pytest.mark.parametrize("site", SGLANG)
def test_what_sglang_hands_on(site, handed_on):
    batch = Batch("cpu", [1, 5], [18, 40])
    has_cache = "k_cache" in names_of(SGLANG[site])
    k, v = sglang_cache(batch)
    values = sglang_values(batch) | {
        "k_cache": k, "v_cache": v, "k": k, "v": v, "cu_seqlens_k": offsets(batch.keys, "cpu"),
        "window_size": (3, 0), "softcap": 30.0, "num_splits": 7, "return_softmax_lse": True,
    }  # fmt: skip
    names = names_of(SGLANG[site])
    function = sglang.flash_attn_with_kvcache if has_cache else sglang.flash_attn_varlen_func
    got = function(**{n: values[n] for n in names})
    out = got[0] if "return_softmax_lse" in names else got
    assert (out is batch.out) == ("out" in names)
    ((of, found),) = handed_on
    assert of == function.__name__
    expected = {name: values[name] for name in names if name not in ("ver", "return_softmax_lse")}
    expected.pop("scheduler_metadata", None)
    found.pop("scheduler_metadata", None)
    # Offsets of new rows, which SGLang writes itself.
    expected.pop("cu_seqlens_k_new", None)
    if not has_cache:
        expected.setdefault("num_splits", 1)
    same(found, expected)


@pytest.mark.parametrize("engine", [vllm, sglang], ids=["vllm", "sglang"])
def test_scales_of_queries(engine, handed_on):
    """Queries in e4m3 are read with their scale, and those in bfloat16 without one."""
    batch = Batch("cpu", [9, 20], [9, 20])
    given = {
        "cu_seqlens_q": offsets(batch.queries, "cpu"), "max_seqlen_q": 20,
        "cu_seqlens_k": offsets(batch.keys, "cpu"), "max_seqlen_k": 20, "causal": True,
        "out": batch.out,
    }  # fmt: skip
    plain = dict(zip("qkv", (batch.q, *(batch.both(29, 2, 256) for _ in "kv")), strict=True))
    codes = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in plain.items()}
    scales = {f"{name}_descale": torch.full((2, 2), 0.5) for name in "qkv"}
    for tensors, expected in ((codes, scales), (plain, dict.fromkeys(scales))):
        engine.flash_attn_varlen_func(**given, **tensors, **scales)
        _, found = handed_on[-1]
        for name, scale in expected.items():
            assert found.get(name) is scale or torch.equal(found[name], scale)


def test_an_out_that_kernels_cannot_write_is_copied_to(handed_on):
    batch = Batch("cpu", [1, 3], [20, 5])
    for call, given in three_calls(batch):
        wide = batch.q.new_full((4, 4, 512), torch.nan)
        found = call(**given | {"out": wide[..., ::2]})
        assert found.data_ptr() == wide.data_ptr() and "out" not in handed_on[-1][1]
        assert (wide[..., ::2] == 1).all() and wide[..., 1::2].isnan().all()
        found, lse = call(**given | {"out": wide[..., 1::2], "return_softmax_lse": True})
        assert lse == "lse" and (wide == 1).all()
        with pytest.raises((TypeError, ValueError), match="out has dtype torch.float32"):
            call(**given | {"out": batch.q.new_empty(4, 4, 512).float()[..., ::2]})


def names_with(engine, fate):
    """Return the arguments of an engine with this fate."""
    table = engine.OPTIONS.arguments
    return {name for name, argument in table.items() if argument.fate == fate}


@pytest.mark.parametrize("engine", [vllm, sglang], ids=["vllm", "sglang"])
def test_what_is_not_offered(engine):
    """Each of the table by its name, and names in no table; none of them silently."""
    batch = Batch("cpu", [1], [4])
    k = batch.both(4, 2, 256)
    given = {
        "q": batch.q, "k": k, "v": k, "cu_seqlens_q": offsets([1], "cpu"), "max_seqlen_q": 1,
        "cu_seqlens_k": offsets([4], "cpu"), "max_seqlen_k": 4,
    }  # fmt: skip
    refused = names_with(engine, arguments.REFUSED)
    assert len(refused) > 9
    for name in refused:
        for value in engine.OPTIONS.arguments[name].accepted:
            assert our_options(engine.OPTIONS, "flash_attn_varlen_func", {name: value}, k, k) == {}
        with pytest.raises(NotImplementedError, match=f"^{name} of .* is Tensor; accepted"):
            engine.flash_attn_varlen_func(**given, **{name: torch.ones(2)})
    with pytest.raises(TypeError, match="unexpected argument 'new_feature'"):
        engine.flash_attn_varlen_func(**given, new_feature=None)
    with pytest.raises(TypeError, match="q has dtype torch.float8_e5m2"):
        quantised = {name: given[name].to(torch.float8_e5m2) for name in "qkv"}
        engine.flash_attn_varlen_func(**given | quantised, q_descale=torch.ones(1, 2))
    assert vllm.get_scheduler_metadata(batch_size=1) is None


def test_every_argument_is_in_the_tables_of_the_page():
    """Each argument is in the row of its kind: honoured, without effect, refused."""
    page = (ROOT / "docs/engines.md").read_text("utf-8")
    for engine, title in ((vllm, "vLLM"), (sglang, "SGLang")):
        rows = page.split(f"| {title}'s argument |")[1].split("\n\n")[0].splitlines()
        kinds = {"honoured": set(), "any value": set(), "the value": set()}
        for row in rows[2:]:
            _, names, kind, _ = row.split("|")
            for start, found in kinds.items():
                if kind.strip().startswith(start):
                    found |= set(re.findall(r"`(\w+)`", names))
        assert names_with(engine, arguments.HONOURED) <= kinds["honoured"]
        assert names_with(engine, arguments.NEUTRAL) == kinds["any value"]
        assert names_with(engine, arguments.REFUSED) == kinds["the value"]


def test_every_argument_of_a_call_site_is_in_a_table():
    own = {"q", "k", "v", "out", "cu_seqlens_q", "max_seqlen_q", "cu_seqlens_k", "max_seqlen_k",
           "seqused_k", "return_softmax_lse"}  # fmt: skip
    caches = {"k_cache", "v_cache", *sglang.functions.CACHE_OPTIONS}
    for calls, engine, more in ((VLLM, vllm, set()), (SGLANG, sglang, caches)):
        known = own | more | {*engine.OPTIONS.arguments}
        for call in calls.values():
            assert set(names_of(call)) <= known


@pytest.mark.parametrize(
    ("module", "calls"), [(VLLM_MODULE, VLLM), (SGLANG_MODULE, SGLANG)], ids=["vllm", "sglang"]
)
def test_call_sites_of_an_installed_engine(module, calls):
    """The engine need not be importable here: its source is read."""
    package, *inside = module.split(".")
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    path = Path(found.submodule_search_locations[0]).joinpath(*inside).with_suffix(".py")
    functions = ("flash_attn_varlen_func", "flash_attn_with_kvcache", "_FA4_DENSE_ATTENTION_KERNEL")
    sites = {
        tuple(sorted(keyword.arg or "**" for keyword in node.keywords))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", getattr(node.func, "attr", "")) in functions
    }
    # Calls of MLA, and the one that hands on what another call site passes.
    sites = {site for site in sites if "qv" not in site and site != ("**",)}
    assert sites == {tuple(sorted(call.split())) for call in calls.values()}
