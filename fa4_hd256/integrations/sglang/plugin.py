"""SGLang's entry point, which each of its processes calls before it reads its options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

NAME = "fa4_hd256"

_EAGLE = "sglang.srt.arg_groups.speculative_hook._handle_eagle_family"
_DRAFTS = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"
_DIFFUSION = "sglang.srt.arg_groups.overrides._dllm_attention_backend"
#: Of the last check of `_handle_eagle_family`, whose list of backends is closed.
_PAGES_OF_TREES = "speculative_eagle_topk > 1 with page_size > 1 is only supported on"


def register() -> None:
    """Register the backend, also in lists of names that SGLang has no adder for, by its hooks."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention import attention_registry as registry
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if NAME in registry.ATTENTION_BACKENDS:
        return
    registry.register_attention_backend(NAME)(_create)
    registry.HYBRID_GDN_SM100_BACKENDS.add(NAME)
    choices.add_attention_backend_choices([NAME])
    choices.add_draft_attention_backend_choices([NAME])
    choices.add_deterministic_attention_backend_choices([NAME])
    choices.add_radix_supported_deterministic_attention_backend_choices([NAME])
    hooks = {_EAGLE: _with_pages, _DRAFTS: _with_drafts, _DIFFUSION: _with_blocks}
    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)


def _create(runner: Any) -> Any:
    from .by_head_dim import create

    return create(runner)


def _with_drafts(
    original: Callable[..., Any],
    factory: Any,
    name: str,
    backends: dict[str, Callable[[], Any]],
    *args: Any,
    **options: Any,
) -> Any:
    """Add the backend to those of drafts, not where stamps_children."""
    runner = factory.draft_model_runner

    def of_steps() -> Any:
        from .backend import SGLangDraft

        return NAME, SGLangDraft(runner, factory.topk, factory.speculative_num_steps)

    def of_rows() -> Any:
        return NAME, _create(runner)

    ours = of_steps if options.get("stamps_children") else of_rows
    return original(factory, name, backends | {NAME: ours}, *args, **options)


def _with_pages(original: Callable[..., None], server_args: Any) -> None:
    """Accept trees of drafts with pages of several rows."""
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view

    try:
        original(server_args)
    except ValueError as error:
        is_ours = set(attention_backends_of(resolved_view(server_args))) == {NAME}
        if not (is_ours and str(error).startswith(_PAGES_OF_TREES)):
            raise


def _with_blocks(original: Callable[..., Any], view: Any) -> Any:
    """Accept the backend where an algorithm of diffusion accepts SGLang's fa4."""
    if view.dllm_algorithm is not None:
        from sglang.srt.dllm.algorithm import get_algorithm_cls

        algorithm = get_algorithm_cls(view.dllm_algorithm)
        names = algorithm.supported_attention_backends
        if "fa4" in names and NAME not in names:
            algorithm.supported_attention_backends = (*names, NAME)
    return original(view)
