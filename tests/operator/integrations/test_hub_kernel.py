"""The Hugging Face kernel: its layout, its functions, and models of transformers that load it."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import subprocess
import sys

import pytest
import torch
from checkout import ROOT

import fa4_hd256
from fa4_hd256.integrations.hub import layout

REPOSITORY = "someone/fa4-hd256"


def loaded(variant):
    """The kernel, imported from its folder under its id, as the library `kernels` does it."""
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def variant(tmp_path_factory):
    return layout.write(tmp_path_factory.mktemp("hub") / "kernel")


@pytest.fixture(scope="module")
def kernel(variant):
    return loaded(variant)


def test_metadata(variant):
    metadata = json.loads((variant / "metadata.json").read_text())
    assert metadata["name"] == "fa4-hd256" and metadata["backend"] == {"type": "cuda"}
    assert metadata["id"].isidentifier()
    build = (variant.parents[1] / "build.toml").read_text()
    assert f"version = {metadata['version']}\n" in build and "[torch-noarch]" in build
    kernels = pytest.importorskip("kernels._rust")
    assert kernels.Metadata.read_from_file(variant / "metadata.json").id == metadata["id"]


def test_the_copy_is_of_this_package_alone(variant):
    files = {str(path.relative_to(variant)) for path in variant.rglob("*") if path.is_file()}
    assert {"__init__.py", "fa4_hd256/interface.py", "fa4_hd256/schedulers/__init__.py"} <= files
    assert not any("__pycache__" in name for name in files)
    assert not any(path.is_symlink() for path in variant.rglob("*"))


def test_the_id_follows_the_content(tmp_path):
    first = layout.write(tmp_path / "one")
    ids = [json.loads((first / "metadata.json").read_text())["id"]]
    assert json.loads((layout.write(tmp_path / "two") / "metadata.json").read_text())["id"] in ids
    (first / "fa4_hd256" / "limits.py").write_text("CHANGED = True\n")
    assert f"fa4_hd256_{layout._digest(first)}" not in ids


def test_another_folder_is_not_overwritten(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    command = [sys.executable, "-m", "fa4_hd256.integrations.hub", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "accepted: a new folder or an earlier kernel" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_two_builds_in_a_process(variant, kernel, tmp_path):
    other = loaded(layout.write(tmp_path / "again"))
    assert other.flash_attn_func.__module__.startswith(other.__name__ + ".")
    assert kernel.flash_attn_func is not fa4_hd256.flash_attn_func
    assert kernel.__version__ == fa4_hd256.__version__


def test_options_that_transformers_looks_for(kernel):
    for function in (kernel.flash_attn_func, kernel.flash_attn_varlen_func):
        names = set(inspect.signature(function).parameters)
        wanted = {"window_size", "softcap", "learnable_sink", "deterministic", "dropout_p"}
        assert wanted <= names
    names = set(inspect.signature(kernel.flash_attn_with_kvcache).parameters)
    assert {"page_table", "cache_seqlens", "softcap", "window_size"} <= names


def test_the_kernels_library_loads_it(variant):
    """Runs with the library installed. On torch's CPU build, whose kernels may not import CuTe DSL,
    torch says that it has CUDA."""
    pytest.importorskip("kernels._rust")  # a folder kernels/ would pass for the library
    code = """
import torch
torch.version.cuda = torch.version.cuda or "13.0"
from kernels import get_kernel
kernel = get_kernel("someone/fa4-hd256", version=1)
print(kernel.__name__, kernel.flash_attn_varlen_func.__module__)
"""
    environment = {**os.environ, "LOCAL_KERNELS": f"{REPOSITORY}={variant.parents[1]}"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    name, module = done.stdout.split()
    assert name == json.loads((variant / "metadata.json").read_text())["id"]
    assert module == f"{name}.fa4_hd256.integrations.hub.functions"


def test_dropout_is_refused(kernel):
    q = torch.zeros(1, 8, 1, 256, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="attention_dropout=0"):
        kernel.flash_attn_func(q, q, q, dropout_p=0.1)


def test_another_head_dim(kernel):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 24, heads, 64, requires_grad=True) for heads in (4, 2, 2))
    out = kernel.flash_attn_func(q, k, v, causal=True, window_size=(7, 7))
    ahead = torch.arange(24) - torch.arange(24)[:, None]
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)),
        attn_mask=(ahead <= 0) & (ahead >= -7),
        enable_gqa=True,
    ).transpose(1, 2)
    torch.testing.assert_close(out, exact)
    dout = torch.randn_like(out)
    gradients = (torch.autograd.grad(o, (q, k, v), dout) for o in (out, exact))
    torch.testing.assert_close(*gradients)
    offsets = torch.tensor([0, 10, 24], dtype=torch.int32)
    packed = kernel.flash_attn_varlen_func(
        *(t[0] for t in (q, k, v)),
        cu_seqlens_q=offsets,
        cu_seqlens_k=offsets,
        max_seqlen_q=14,
        max_seqlen_k=14,
    )
    torch.testing.assert_close(
        packed[:10], kernel.flash_attn_func(q[:, :10], k[:, :10], v[:, :10])[0]
    )
    with pytest.raises(NotImplementedError, match="head_dim 64 is given softcap"):
        kernel.flash_attn_func(q, k, v, softcap=30.0)


@pytest.mark.parametrize(
    ("window", "seen"),
    [
        ((-1, 3), lambda ahead: ahead <= 3),
        ((5, -1), lambda ahead: ahead >= -5),
        ((-1, -1), lambda ahead: ahead == ahead),
        ((None, -2), lambda ahead: ahead <= -2),
        ((2, -3), lambda ahead: ahead != ahead),
    ],
)
def test_windows_at_another_head_dim_are_those_of_the_operator(kernel, window, seen):
    """-1 is unbounded, as for `flash_attn_func`; other negative numbers are bounds."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 24, heads, 64) for heads in (4, 2, 2))
    out = kernel.flash_attn_func(q, k, v, window_size=window)
    mask = seen(torch.arange(24) - torch.arange(24)[:, None])
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), attn_mask=mask, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(out, exact.nan_to_num() * mask.any(1)[:, None, None])


def test_a_model_by_the_name_of_a_repository(variant, kernel, monkeypatch, device):
    """Runs transformers' own loading and wrapper; the download alone is replaced."""
    pytest.importorskip("transformers")
    from transformers.integrations import hub_kernels
    from transformers.models.gemma3 import Gemma3ForCausalLM, Gemma3TextConfig

    fetched = []

    def get_kernel(repository, **options):
        fetched.append(repository)
        return kernel

    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", get_kernel)
    torch.manual_seed(7)
    config = Gemma3TextConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=256,
        query_pre_attn_scalar=64,
        sliding_window=8,
        initializer_range=0.2,
        layer_types=["sliding_attention", "full_attention"],
    )
    model = Gemma3ForCausalLM(config).to(device, torch.bfloat16).eval()
    ids = torch.randint(1, 64, (2, 40)).to(device)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    results = []
    for implementation in (REPOSITORY, "eager"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            results.append(model(ids, attention_mask=mask).logits.float()[mask.bool()])
    exact = Gemma3ForCausalLM(config).to(device)
    exact.load_state_dict({name: t.float() for name, t in model.state_dict().items()})
    exact.set_attn_implementation("eager")
    with torch.no_grad():
        wanted = exact(ids, attention_mask=mask).logits[mask.bool()]
    ours, eager = ((one - wanted).abs().max().item() for one in results)
    assert fetched == [REPOSITORY]
    assert ours <= 2 * eager + 2**-8 * wanted.abs().max().item() and ours < wanted.std().item() / 2
