"""Attention for Hugging Face transformers models.

    from fa4_hd256.integrations.transformers import register
    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fa4_hd256")

transformers calls two functions under the name of an implementation: one for the mask, once per
forward pass and kind of layer, and one for the attention of each layer. The mask function describes
the whole mask: causality, windows, padding, packed sequences. The attention function follows that
description, never the layer's own settings, which may disagree with it. Without a registered mask
function transformers builds no mask at all and drops the padding in silence.
"""

from .gates import GATED, use_output_gate
from .layers import BATCHING_NAME, NAME, PACKED, attention, batched_attention
from .masks import mask
from .registration import VERSIONS, check_version, register, use_in_continuous_batching

__all__ = [
    "BATCHING_NAME",
    "GATED",
    "NAME",
    "PACKED",
    "VERSIONS",
    "attention",
    "batched_attention",
    "check_version",
    "mask",
    "register",
    "use_in_continuous_batching",
    "use_output_gate",
]
