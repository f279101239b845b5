"""Writes tests/tiny/golden: one small random checkpoint a family, made and evaluated by transformers, so that `make test` can show parity
without PyTorch. Run it as `python -m tests.tiny.make_golden [name ...]` where PyTorch and transformers are installed.

Each folder holds what transformers saved, and golden.npz: for prompt i `prompt_i` (ids), `positions_i` and `logits_i` (float32
[positions, V], a selection of the prompt's positions to keep the folder small) and `tokens_i` (greedy ids). manifest.json records
versions, seeds and the least gap between the best two logits of any greedy step.
"""

from __future__ import annotations

import json
import shutil
import sys
import zlib
from pathlib import Path

import numpy as np
import torch
import transformers

from tests.tiny.families import FAMILIES
from tests.tiny.reference import GAP, Reference, make

GOLDEN = Path(__file__).parent / "golden"
MANIFEST = GOLDEN / "manifest.json"


def kept_positions(length: int) -> np.ndarray:
    """The last eight positions and four spread over the rest, [12] int32."""
    return np.unique(np.concatenate([np.linspace(0, length - 9, 4), np.arange(length - 8, length)]).astype(np.int32))


def arrays(reference: Reference) -> dict[str, np.ndarray]:
    out: dict[str, np.ndarray] = {}
    for i, (prompt, logits, tokens) in enumerate(zip(reference.prompts, reference.logits, reference.tokens, strict=True)):
        positions = kept_positions(len(prompt))
        out[f"prompt_{i}"] = np.array(prompt, np.int32)
        out[f"positions_{i}"] = positions
        out[f"logits_{i}"] = logits[positions]
        out[f"tokens_{i}"] = np.array(tokens, np.int32)
    return out


def main(names: list[str]) -> None:
    manifest = json.loads(MANIFEST.read_text()) if MANIFEST.exists() else {}
    checkpoints = manifest.get("checkpoints", {})
    for name in names or FAMILIES:
        folder = GOLDEN / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        seed, reference = make(FAMILIES[name], folder, zlib.crc32(name.encode()) % 100_000)
        assert reference.gap > GAP
        np.savez_compressed(folder / "golden.npz", **arrays(reference))  # type: ignore[arg-type]
        checkpoints[name] = {"seed": seed, "store": FAMILIES[name].store, "least_gap": round(reference.gap, 5)}
        spread = float(np.std(reference.logits[-1]))
        print(f"{name}: seed {seed}, gap {reference.gap:.4f}, spread {spread:.2f}, distinct {[len(set(t)) for t in reference.tokens]}")
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}
    ordered = {name: checkpoints[name] for name in FAMILIES if name in checkpoints}
    MANIFEST.write_text(json.dumps({"versions": versions, "checkpoints": ordered}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
