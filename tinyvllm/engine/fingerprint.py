"""The identity of a checkpoint, for recordings and for the prefix cache on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def fingerprint(model: Mapping[str, Any], tensors: Mapping[str, Any]) -> str:
    """A hash of a checkpoint's description and of each tensor's name, format, shape and first bytes: it reads a page of each, not more."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps(model, sort_keys=True, default=str).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.format} {tuple(tensor.shape)}".encode())
        digest.update(tensor.data.reshape(-1)[:64].tobytes())
    return digest.hexdigest()
