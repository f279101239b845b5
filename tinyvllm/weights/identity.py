"""Which model a checkpoint is, by its content: packed weights and cached prefixes belong to it, wherever its files are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from tinyvllm.errors import ModelError
from tinyvllm.storage.digests import content_digest
from tinyvllm.weights.checkpoint import Checkpoint
from tinyvllm.weights.gguf import split_parts


def weights_digest(checkpoint: Checkpoint, stopped: Callable[[], bool] | None = None) -> str:
    """32 hexadecimal digits of the description and of every byte of the weights' files; of the description alone without tensors.

    The first call for a model reads its files, at 1 to 1.5 GB/s for each core; later ones compare their times. ModelError if a file cannot
    be read. `stopped` as for `content_digest`.
    """
    digest = hashlib.sha256(checkpoint.kind.encode())
    if checkpoint.kind == "safetensors" or not checkpoint.tensors:  # GGUF's description is in its file
        digest.update(json.dumps(checkpoint.config, sort_keys=True, default=str).encode())
    if checkpoint.tensors:
        try:
            digest.update(content_digest(_files(checkpoint), stopped).encode())
        except OSError as error:
            raise ModelError(f"weights: {checkpoint.path} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()[:32]


def _files(checkpoint: Checkpoint) -> list[Path]:
    """The files with the weights: safetensors.py prefers model.safetensors to shards, and shards are all that there are."""
    if checkpoint.kind == "gguf":
        return split_parts(checkpoint.path)
    single = checkpoint.path / "model.safetensors"
    return [single] if single.is_file() else sorted(checkpoint.path.glob("*.safetensors"))
