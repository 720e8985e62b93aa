"""Attention of published models with head_dim 256: one table, for `warm_up`, `build` and `demo`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .words import shown


@dataclass(frozen=True)
class Mask:
    """Mask of layers, as `flash_attn_func` takes it."""

    causal: bool
    window_size: tuple[int | None, int | None] = (None, None)


#: Masks of layers that see all keys before them, and of those that see all keys.
CAUSAL, FULL = Mask(True), Mask(False)


def local(keys: int) -> Mask:
    """Return the mask of layers whose queries see so many keys, themselves included."""
    return Mask(True, (keys - 1, None))


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


@dataclass(frozen=True)
class AttentionModel:
    """Attention of one published model, or of one like it.

    name: for people. heads_q, heads_kv: of a layer. masks: of its kinds of layers. softcap: 0 for
    none. softmax_scale: None for 1 / sqrt(256). sink: whether heads have one.
    """

    name: str
    heads_q: int
    heads_kv: int
    masks: tuple[Mask, ...] = (CAUSAL,)
    softcap: float = 0.0
    softmax_scale: float | None = None
    sink: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for heads, masks or a sink that are none."""
        for name in ("heads_q", "heads_kv"):
            if not _is_positive(getattr(self, name)):
                given = shown(getattr(self, name))
                raise ValueError(f"{name} is {given}; accepted: an int, 1 or more")
        masks = self.masks
        if not isinstance(masks, tuple) or not masks or not all(isinstance(m, Mask) for m in masks):
            raise ValueError(f"masks is {shown(masks)}; accepted: a tuple of one Mask or more")
        if not isinstance(self.sink, bool):
            raise ValueError(f"sink is {shown(self.sink)}; accepted: True or False")

    def sharded(self, ranks: int) -> AttentionModel:
        """Return the model that each of so many ranks of tensor parallelism has; KV heads are
        repeated where there are fewer of them.

        Raises ValueError where the ranks do not divide the heads.
        """
        if (
            not _is_positive(ranks)
            or self.heads_q % ranks
            or (self.heads_kv % ranks and ranks % self.heads_kv)
        ):
            raise ValueError(
                f"{shown(ranks)} ranks for {self.heads_q} query and {self.heads_kv} key/value "
                f"heads of {self.name}; accepted: ranks that divide both, or that the latter divide"
            )
        heads_kv = max(1, self.heads_kv // ranks)
        return replace(self, heads_q=self.heads_q // ranks, heads_kv=heads_kv)


#: Models by the name that commands take. Models that share a row differ in nothing that is said
#: here.
MODELS = {
    "gemma-1-2b": AttentionModel("Gemma 1 2B", 8, 1),
    "gemma-1-7b": AttentionModel("Gemma 1 7B", 16, 16),
    "gemma-2-2b": AttentionModel("Gemma 2 2B", 8, 4, (CAUSAL, local(4096)), softcap=50.0),
    "gemma-2-9b": AttentionModel("Gemma 2 9B", 16, 8, (CAUSAL, local(4096)), softcap=50.0),
    # Every query sees 256 keys to each side.
    "embeddinggemma": AttentionModel("EmbeddingGemma", 3, 1, (FULL, Mask(False, (256, 256)))),
    "gemma-3-1b": AttentionModel("Gemma 3 270M and 1B", 4, 1, (CAUSAL, local(512))),
    "gemma-3-4b": AttentionModel("Gemma 3 4B", 8, 4, (CAUSAL, local(1024))),
    "gemma-3-12b": AttentionModel("Gemma 3 12B", 16, 8, (CAUSAL, local(1024))),
    # Gemma 4's sliding layers have head_dim 256.
    "gemma-4-e2b": AttentionModel("Gemma 4 E2B", 8, 1, (local(512),), softmax_scale=1.0),
    "gemma-4-e4b": AttentionModel("Gemma 4 E4B", 8, 2, (local(512),), softmax_scale=1.0),
    "gemma-4-26b-a4b": AttentionModel("Gemma 4 26B-A4B", 16, 8, (local(1024),), softmax_scale=1.0),
    "gemma-4-31b": AttentionModel("Gemma 4 31B", 32, 16, (local(1024),), softmax_scale=1.0),
    "qwen3-next-80b-a3b": AttentionModel("Qwen3-Next-80B-A3B", 16, 2),
    "qwen3.5-35b-a3b": AttentionModel("Qwen3.5-35B-A3B", 16, 2),
    "qwen3.5-397b-a17b": AttentionModel("Qwen3.5-397B-A17B", 32, 2),
    "qwen3.6-35b-a3b": AttentionModel("Qwen3.6-35B-A3B", 16, 2),
    "qwen3.8-27b": AttentionModel("Qwen3.8-27B", 24, 4),
    "qwen3.8-flash-next": AttentionModel("Qwen3.8-Flash-Next", 24, 2),
    "glm-5": AttentionModel("GLM-5 MLA prefill", 64, 64),
    "glm-5-tp8": AttentionModel("GLM-5 MLA prefill, one rank of TP8", 8, 8),
}


def model_named(name: str) -> AttentionModel:
    """The model of that name. Raises ValueError, with those that there are, for another."""
    if name not in MODELS:
        raise ValueError(f"model is {name!r}; accepted: {', '.join(MODELS)}")
    return MODELS[name]
