"""The table of model families: which checkpoints they read and how. A new family is a row here and a file with its differences."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from types import SimpleNamespace
from typing import Any

import numpy as np
from tinygrad import nn

from tinyvllm.errors import ModelError
from tinyvllm.foreign import quoted
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.models import (
    deepseek,
    dots,
    ernie,
    gemma,
    gemma4,
    glm,
    gpt2,
    gpt_oss,
    granite,
    llama,
    ministral,
    mixtral,
    olmo,
    phi,
    qwen,
    qwen_next,
    smollm,
)
from tinyvllm.models.config import ModelConfig, Source, Transform, WeightRecipe
from tinyvllm.models.delta import DraftBlock, HybridModel
from tinyvllm.models.latent import LatentModel
from tinyvllm.models.mixture import with_joined_experts
from tinyvllm.models.understood import Recorded, refuse_unread

Sources = Callable[[ModelConfig, str, str], tuple[tuple[str, ...], Transform | None]]  # of a configuration, a kind of file and a tensor


@dataclass(frozen=True)
class Family:
    """`architectures` are names in Hugging Face's config.json, `gguf` those in general.architecture."""

    architectures: tuple[str, ...]
    gguf: tuple[str, ...]
    from_hf: Callable[[Source], ModelConfig]
    from_gguf: Callable[[Source], ModelConfig]
    sources: Sources
    model: Callable[[ModelConfig], Any] = llama.Llama


FAMILIES = (
    Family(("LlamaForCausalLM",), ("llama",), llama.from_hf, llama.from_gguf, llama.sources),
    Family(("MistralForCausalLM",), (), llama.mistral_from_hf, llama.from_gguf, llama.sources),
    Family(("MixtralForCausalLM",), (), mixtral.from_hf, llama.from_gguf, mixtral.sources),
    Family(("Qwen2ForCausalLM", "MiMoForCausalLM"), ("qwen2", "qwen2vl"), qwen.qwen2_from_hf, qwen.qwen2_from_gguf, qwen.sources),
    Family(("Qwen3ForCausalLM",), ("qwen3", "qwen3vl"), qwen.qwen3_from_hf, qwen.qwen3_from_gguf, qwen.sources),
    Family(("Qwen3MoeForCausalLM",), ("qwen3moe", "qwen3vlmoe"), qwen.qwen3_from_hf, qwen.qwen3_moe_from_gguf, qwen.sources),
    Family(("Qwen2MoeForCausalLM",), ("qwen2moe",), qwen.qwen2_moe_from_hf, qwen.qwen2_moe_from_gguf, qwen.sources),
    Family(("Phi3ForCausalLM",), ("phi3",), phi.from_hf, phi.from_gguf, phi.sources),
    Family(("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"), ("ernie4_5",), ernie.from_hf, ernie.from_gguf, ernie.sources),
    Family(("Ernie4_5_MoeForCausalLM",), ("ernie4_5-moe",), ernie.moe_from_hf, ernie.moe_from_gguf, ernie.moe_sources),
    Family(("SmolLM3ForCausalLM",), ("smollm3",), smollm.from_hf, smollm.from_gguf, llama.sources),
    Family(("Olmo2ForCausalLM",), (), olmo.olmo2_from_hf, olmo.from_gguf, olmo.sources),
    Family(("Olmo3ForCausalLM",), ("olmo2",), olmo.olmo3_from_hf, olmo.from_gguf, olmo.sources),
    Family(("OlmoeForCausalLM",), ("olmoe",), olmo.olmoe_from_hf, olmo.olmoe_from_gguf, olmo.olmoe_sources),
    Family(("GraniteForCausalLM",), ("granite",), granite.from_hf, granite.from_gguf, llama.sources),
    Family(("GraniteMoeHybridForCausalLM",), (), granite.hybrid_from_hf, granite.from_gguf, granite.sources),
    Family(
        ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"), ("granitemoe",), granite.moe_from_hf, granite.from_gguf, granite.sources
    ),
    Family(("Ministral3ForCausalLM",), ("mistral3",), ministral.from_hf, ministral.from_gguf, llama.sources),
    Family(("Glm4ForCausalLM",), ("glm4",), glm.from_hf, glm.from_gguf, glm.sources),
    Family(("Glm4MoeForCausalLM",), ("glm4moe",), glm.moe_from_hf, glm.moe_from_gguf, glm.moe_sources),
    Family(("Dots1ForCausalLM",), ("dots1",), dots.from_hf, dots.from_gguf, dots.sources),
    Family(("GptOssForCausalLM",), ("gpt-oss",), gpt_oss.from_hf, gpt_oss.from_gguf, gpt_oss.sources),
    Family(("Gemma2ForCausalLM",), ("gemma2",), gemma.gemma2_from_hf, gemma.gemma2_from_gguf, gemma.sources),
    Family(("Gemma3ForCausalLM",), ("gemma3",), gemma.gemma3_from_hf, gemma.gemma3_from_gguf, gemma.sources),
    Family(("Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM"), ("gemma4",), gemma4.from_hf, gemma4.from_gguf, gemma4.sources, gemma4.Gemma4),
    Family(("DeepseekV2ForCausalLM",), ("deepseek2",), deepseek.v2_from_hf, deepseek.from_gguf, deepseek.sources, LatentModel),
    Family(("DeepseekV3ForCausalLM",), (), deepseek.v3_from_hf, deepseek.from_gguf, deepseek.sources, LatentModel),
    Family(("Glm4MoeLiteForCausalLM",), (), deepseek.glm_lite_from_hf, deepseek.from_gguf, deepseek.sources, LatentModel),
    Family(("Qwen3NextForCausalLM",), ("qwen3next",), qwen_next.next_from_hf, qwen_next.from_gguf, qwen_next.sources, HybridModel),
    Family(("Qwen3_5ForCausalLM",), ("qwen35",), qwen_next.from_hf, qwen_next.from_gguf, qwen_next.sources, HybridModel),
    Family(("Qwen3_5MoeForCausalLM",), ("qwen35moe",), qwen_next.from_hf, qwen_next.from_gguf, qwen_next.sources, HybridModel),
    Family(("GPT2LMHeadModel",), ("gpt2",), gpt2.from_hf, gpt2.from_gguf, gpt2.sources, gpt2.GPT2),
)


MAX_REFUSAL = 1000  # characters of a message that lists all architectures


def find_family(source: Source) -> Family:
    """The family of a checkpoint, or a ModelError that names the architecture and lists the supported ones."""
    if source.kind == "gguf":
        names, field = [source.config.get("general.architecture")], "gguf"
    else:
        names, field = source.config.get("architectures") or [], "architectures"
        if not isinstance(names, list) or not names:
            raise ModelError(f"config.json: 'architectures' must name the model class, got {quoted(names)}")
    for family in FAMILIES:
        if any(name in getattr(family, field) for name in names):
            return family
    known = _listed([name for family in FAMILIES for name in getattr(family, field)])
    raise ModelError(f"models: the architecture {', '.join(map(quoted, names[:3]))} is not supported; supported are {known}", MAX_REFUSAL)


def _listed(names: list[str]) -> str:
    """The names, with the ending that most of Hugging Face's share written once."""
    ending = "ForCausalLM"
    others = [name for name in names if not name.endswith(ending)]
    if len(others) == len(names):
        return ", ".join(names)
    shared = ", ".join(name.removesuffix(ending) for name in names if name.endswith(ending))
    return f"{shared} (each followed by {ending}), {', '.join(others)}"


@dataclass(frozen=True)
class _Reading:
    """A checkpoint whose description remembers what was read of it."""

    source: Source
    config: Recorded

    @property
    def kind(self) -> str:
        return self.source.kind

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self.source.shape(name)

    def array(self, name: str) -> np.ndarray:
        return self.source.array(name)


def read_config(family: Family, source: Source) -> ModelConfig:
    """ModelError also for a key that changes what the model computes, and that the family does not read."""
    reading, gguf = _Reading(source, Recorded(source.config)), source.kind == "gguf"
    config = family.from_gguf(reading) if gguf else family.from_hf(reading)
    refuse_unread(reading.config, source.kind, family.gguf if gguf else family.architectures)
    return config if gguf else with_joined_experts(config, source)


def check_layers(family: Family, config: ModelConfig, source: Source) -> None:
    """ModelError if the file lacks the last layer, before a model of that many layers is built: with a wrong number that takes minutes."""
    names, _ = family.sources(config, source.kind, f"blk.{config.num_blocks - 1}.attn_output.weight")
    if missing := [name for name in names if source.shape(name) is None]:
        key = "block_count" if source.kind == "gguf" else "n_layer" if config.family == "gpt2" else "num_hidden_layers"
        raise ModelError(f"models: {key} is {config.num_blocks}, but the file holds no tensor {missing[0]}; do the two belong together?")


IGNORABLE = (
    "*.attn.bias",
    "*.attn.masked_bias",
    "*.rotary_emb.inv_freq",
    "rope_freqs.weight",
    "rope_factors_*.weight",
    "model.mtp_layers.*",  # read by drafts only (speculate/mtp.py)
)


def refuse_unused(config: ModelConfig, weights: list[WeightRecipe], names: Iterable[str]) -> None:
    """ModelError if the file has tensors that the model does not use: then its description is of another model.

    Constants that converters add to the weights (masks, frequencies) and the copy of a tied head are ignored.
    """
    used = {source for weight in weights for source in weight.sources}
    drafts = range(config.num_blocks, config.num_blocks + config.draft_layers)
    ignorable = [*IGNORABLE, *config.ignored, *(f"{prefix}.{layer}.*" for layer in drafts for prefix in ("model.layers", "blk"))]
    if config.tied:
        ignorable.append("lm_head.weight")
    extra = [name for name in names if name not in used and not any(fnmatchcase(name, pattern) for pattern in ignorable)]
    if extra:
        listed = ", ".join(sorted(extra)[:3]) + (f" and {len(extra) - 3} more" if len(extra) > 3 else "")
        raise ModelError(f"models: the file has tensors that its description does not use: {listed}; do the two belong together?")


def recipes_of(family: Family, config: ModelConfig, model: Any, kind: str) -> list[WeightRecipe]:
    """The recipe of every tensor of the model: name, shape and sources in the file."""
    return _recipes(family.sources, config, model, kind)


def draft_recipes(config: ModelConfig, block: DraftBlock) -> list[WeightRecipe]:
    """The recipes of a layer for drafts, `config` being that of qwen_next.draft_layer. Names are those of the layer's own modules."""
    recipes = _recipes(qwen_next.draft_sources, config, SimpleNamespace(blk=[block]), "safetensors")
    return [replace(recipe, name=recipe.name.removeprefix("blk.0.")) for recipe in recipes]


def _recipes(sources: Sources, config: ModelConfig, model: Any, kind: str) -> list[WeightRecipe]:
    """As `recipes_of`, with a family's `sources`."""
    shapes = {name: tuple(int(d) for d in tensor.shape) for name, tensor in nn.state.get_state_dict(model).items()}
    return [_recipe(sources, config, name, shape, kind) for name, shape in shapes.items()]


# Matrices with kernels of their own. A router's are float32: a rounding would not change a product a little, but choose another expert.
_STEMS = dict.fromkeys(("ffn_gate_inp", "ffn_gate_inp_shexp"), "norm_route") | dict.fromkeys(
    ("ffn_gate_exps", "ffn_up_exps"), "experts_gate_up_silu"
)
_STEMS |= dict.fromkeys(("ffn_down_exps", "attn_k_b", "attn_v_b"), "experts_down")


def _recipe(sources: Sources, config: ModelConfig, name: str, shape: tuple[int, ...], kind: str) -> WeightRecipe:
    stem = _STEMS.get(name.split(".")[-2], "matmul")
    return WeightRecipe(
        name,
        shape,
        *sources(config, kind, name),
        offset=config.norm_offset * (name.endswith("norm.weight") and not name.endswith("ssm_norm.weight")),
        factor=config.dim**-0.5 if name.endswith("ffn_gate_inp_norm.weight") else 1.0,
        logarithm=kind == "safetensors" and name.endswith("ssm_a.weight"),
        share=config.num_experts_per_tok / config.num_experts if "_exps." in name else 1.0,
        stem=stem,
        format="F32" if stem == "norm_route" else None,
    )
