"""Drafters that read the target's own hidden states, by their method's name: loadable heads, and the two forms without training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tinyvllm.config.engine import EngineConfig
from tinyvllm.errors import ArgumentError
from tinyvllm.models.config import ModelConfig
from tinyvllm.runner.memory import NO_DRAFTER, DrafterMemory
from tinyvllm.runner.opened import OpenedModel
from tinyvllm.runner.runner import Runner
from tinyvllm.speculate.eagle import EagleConfig, eagle_recipes, load_eagle, read_eagle, read_eagle3
from tinyvllm.speculate.eagle_drafter import EagleDrafter, eagle_memory
from tinyvllm.speculate.eagle_lite import EagleLiteDrafter
from tinyvllm.speculate.gated_mtp import gated_mtp_file, load_gated_mtp, read_gated_mtp
from tinyvllm.speculate.head_files import SPEAKER, HeadFile, Target, head_dtype, open_heads
from tinyvllm.speculate.medusa import MedusaDrafter, MedusaLiteDrafter, load_medusa, medusa_recipes
from tinyvllm.speculate.mtp import mtp_file, read_mtp
from tinyvllm.speculate.protocol import StateDrafter
from tinyvllm.weights.checkpoint import Checkpoint, open_checkpoint

LOADED = ("medusa", "eagle", "eagle3", "mtp")
UNTRAINED = ("medusa_lite", "eagle_lite")
DEFAULT_DRAFTS = 7  # a controller chooses fewer where more do not pay


def self_drafter(method: str, heads: Path | None, runner: Runner, max_drafts: int | None = None, format: str | None = None) -> StateDrafter:
    """The drafter of a method in LOADED, from the folder `heads`, or in UNTRAINED; at most `max_drafts` guesses a sequence and step.
    Where it is None, that is the number of Medusa's heads, and DEFAULT_DRAFTS for other methods. `format` is that of their matrices; None:
    as stored.

    ArgumentError for a method that is none of these or lacks its folder, ModelError and FormatError for heads that cannot be read.
    """
    count = DEFAULT_DRAFTS if max_drafts is None else max_drafts
    if method in UNTRAINED:
        if heads is not None:
            raise ArgumentError(f"{SPEAKER}: the method {method} reads no heads; leave model={str(heads)!r} out")
        return MedusaLiteDrafter(runner, count) if method == "medusa_lite" else EagleLiteDrafter(runner, count)
    if method not in LOADED:
        raise ArgumentError(f"{SPEAKER}: no self-drafting method {method!r}; there are {', '.join((*LOADED, *UNTRAINED))}")
    if method == "mtp":
        file = _mtp_file(runner.checkpoint if heads is None else open_checkpoint(heads), runner.config)
        if runner.config.delta is not None:
            return EagleDrafter(runner, load_gated_mtp(file, runner, format), count)
        return EagleDrafter(runner, load_eagle(file, runner, read_mtp(file, runner.config), format), count)
    if heads is None:
        raise ArgumentError(f"{SPEAKER}: the method {method} needs the folder of its heads; give it as model")
    file = open_heads(heads)
    if method == "medusa":
        return MedusaDrafter(runner, load_medusa(file, runner, format), max_drafts)
    config = eagle_config(file, method, Target.of(runner.config))
    return EagleDrafter(runner, load_eagle(file, runner, config, format), count)


def heads_memory(
    method: str, heads: Path | None, opened: OpenedModel, engine: EngineConfig, max_drafts: int | None, format: str | None = None
) -> DrafterMemory:
    """What the heads of a method will take in an engine with the target `opened`. Errors as `self_drafter`; nothing is loaded."""
    if method not in LOADED or (heads is None and method != "mtp"):
        return NO_DRAFTER
    target, file = Target.of(opened.config), _head_file(method, heads, opened)
    plan = replace(opened.plan, dtype=head_dtype(file), format=format, imatrix=None)  # as load_head_products has it
    if method == "medusa":
        return DrafterMemory(plan.needed_bytes(medusa_recipes(file, target)[1], file.checkpoint))
    if method == "mtp" and opened.config.delta is not None:
        layer, _, recipes = read_gated_mtp(file, opened.config)
    else:
        config = read_mtp(file, opened.config) if method == "mtp" else eagle_config(file, method, target)
        layer, recipes = config.layer, eagle_recipes(file, config, target)
    tables = [recipe for recipe in recipes if recipe.name == "embed_tokens.weight"]  # no product: not packed
    weights = plan.needed_bytes([recipe for recipe in recipes if recipe not in tables], file.checkpoint)
    weights += replace(plan, format=None).needed_bytes(tables, file.checkpoint)
    cache = eagle_memory(layer, engine.block_size, plan.dtype, max_drafts or DEFAULT_DRAFTS, engine.max_num_seqs)
    return replace(cache, weights=weights)


def _head_file(method: str, heads: Path | None, opened: OpenedModel) -> HeadFile:
    """The heads of a method of LOADED: of their folder, or those in the target's own checkpoint."""
    if method != "mtp":
        assert heads is not None, "the other methods have a folder"
        return open_heads(heads)
    return _mtp_file(opened.checkpoint if heads is None else open_checkpoint(heads), opened.config)


def _mtp_file(checkpoint: Checkpoint, model: ModelConfig) -> HeadFile:
    """The layer for drafts of a model's kind."""
    return mtp_file(checkpoint) if model.delta is None else gated_mtp_file(checkpoint, model)


def eagle_config(file: HeadFile, method: str, target: Target) -> EagleConfig:
    """The configuration of EAGLE heads. ArgumentError if the file is of the other kind."""
    is_eagle3 = file.shape("norm.weight") is not None or file.fields.get("speculators_model_type") is not None
    if is_eagle3 != (method == "eagle3"):
        found, other = ("EAGLE-3", "eagle3") if is_eagle3 else ("EAGLE-1 or 2", "eagle")
        raise ArgumentError(
            f"{SPEAKER}: {file.checkpoint.path} holds heads of {found}; expected those of the method {method}. Use {other!r}"
        )
    return (read_eagle3 if is_eagle3 else read_eagle)(file, target)
