"""Named model shapes, and checkpoints of random numbers in those shapes: the same numbers as a Hugging Face folder and as GGUF files.

Speed depends on shapes and formats, hardly on what the numbers are. So no checkpoint is needed to measure: all tensors are cut from one
pool of normal numbers (deviation 0.02), which is rounded or quantised once; files are written at the disk's speed. The pool is a prime
number of blocks of 32 long, so that no two rows of a matrix begin at the same place in it.

What goes where in a GGUF file is llama.cpp's convention: its tensor names; q and k rows of architecture `llama` as neighbouring pairs;
Llama-3's RoPE scaling as the tensor `rope_freqs.weight`, a divisor a frequency. The `gguf` package writes the file.

    python -m benchmarks.shapes --shape tinyllama-1.1b --formats bf16,q8_0,q4_0 --folder FOLDER
"""

from __future__ import annotations

import argparse
import json
import math
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tinyvllm.quant.codecs import bf16_to_f32, f32_to_bf16, pack
from tinyvllm.quant.formats import FORMATS as LAYOUTS
from tinyvllm.quant.formats import Layout, packed_in
from tinyvllm.quant.layouts import row_bytes
from tinyvllm.quant.random_rows import random_rows

FORMATS = ("BF16", "Q4_K_M", *packed_in(Layout.PANELS))
BLOCK = 32  # numbers
Rows = Callable[[str, tuple[int, ...]], np.ndarray]
_POOL_BLOCKS = 32749  # of the format, at least 32 numbers each; prime


def _llama(E: int, F: int, L: int, H: int, K: int, V: int, **more: Any) -> dict[str, Any]:
    """A Hugging Face description of a LLaMA. 16384 positions whatever the original was trained for: contexts are measured, not answers."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_act": "silu",
        "hidden_size": E, "intermediate_size": F, "num_hidden_layers": L, "num_attention_heads": H, "num_key_value_heads": K,
        "head_dim": E // H, "vocab_size": V, "max_position_embeddings": 16384, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    } | more  # fmt: skip


def _llama3_scaling(factor: float) -> dict[str, Any]:
    scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}
    return {"rope_theta": 500000.0, "rope_scaling": {"factor": factor, **scaling}, "max_position_embeddings": 131072}


SHAPES: dict[str, dict[str, Any]] = {
    "tiny160m": _llama(768, 3072, 12, 12, 12, 32000),
    "tinyllama-1.1b": _llama(2048, 5632, 22, 32, 4, 32000),
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, 8, 128256, tie_word_embeddings=True, **_llama3_scaling(32.0)),
    "qwen3-0.6b": _llama(
        1024, 3072, 28, 16, 8, 151936, architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=128, rms_norm_eps=1e-6,
        rope_theta=1000000.0, max_position_embeddings=40960, tie_word_embeddings=True, attention_bias=False,
    ),
    "llama-3.1-8b": _llama(4096, 14336, 32, 32, 8, 128256, **_llama3_scaling(8.0)),
    # the layers of Qwen3-30B-A3B, with 64 of its 128 experts, 8 of them a token, and 12 of its 48 layers: 4 billion parameters, 0.8 a token
    "qwen3-moe-4b": _llama(
        2048, 768, 12, 32, 4, 32000, architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", head_dim=128, rms_norm_eps=1e-6,
        rope_theta=1000000.0, attention_bias=False, num_experts=64, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
    ),
}  # fmt: skip

DENSE = [name for name, config in SHAPES.items() if "num_experts" not in config]


def tensors(config: dict[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(Hugging Face name, GGUF name, shape) of every tensor, in the order of the files; GGUF's experts of a layer are one tensor."""
    E, F, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    H, K, D = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    layer = [
        ("input_layernorm", "attn_norm", (E,)),
        ("self_attn.q_proj", "attn_q", (H * D, E)),
        ("self_attn.k_proj", "attn_k", (K * D, E)),
        ("self_attn.v_proj", "attn_v", (K * D, E)),
        ("self_attn.o_proj", "attn_output", (E, H * D)),
        ("post_attention_layernorm", "ffn_norm", (E,)),
    ]
    if X := config.get("num_experts"):
        layer += [
            ("mlp.gate", "ffn_gate_inp", (X, E)),
            ("mlp.experts.gate_proj", "ffn_gate_exps", (X, F, E)),
            ("mlp.experts.up_proj", "ffn_up_exps", (X, F, E)),
            ("mlp.experts.down_proj", "ffn_down_exps", (X, E, F)),
        ]
    else:
        layer += [("mlp.gate_proj", "ffn_gate", (F, E)), ("mlp.up_proj", "ffn_up", (F, E)), ("mlp.down_proj", "ffn_down", (E, F))]
    if config["model_type"] in ("qwen3", "qwen3_moe"):
        layer += [("self_attn.q_norm", "attn_q_norm", (D,)), ("self_attn.k_norm", "attn_k_norm", (D,))]
    yield "model.embed_tokens.weight", "token_embd.weight", (V, E)
    for n in range(config["num_hidden_layers"]):
        for theirs, gguf_name, shape in layer:
            yield f"model.layers.{n}.{theirs}.weight", f"blk.{n}.{gguf_name}.weight", shape
    yield "model.norm.weight", "output_norm.weight", (E,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", "output.weight", (V, E)


def bytes_per_token(config: dict[str, Any], format: str) -> int:
    """Bytes of weights that decoding one token reads: all but the embedding table, unless it is the head as well, and the experts that it
    does not choose.
    """
    total = 0
    for name, gguf_name, shape in tensors(config):
        if name == "model.embed_tokens.weight" and not config["tie_word_embeddings"]:
            continue
        count = math.prod(shape) * config["num_experts_per_tok"] // config["num_experts"] if len(shape) == 3 else math.prod(shape)
        layout = LAYOUTS[format_of(gguf_name, format, config["num_hidden_layers"])]
        total += count * 4 if _is_float32(gguf_name, shape) else count // layout.elements * layout.nbytes
    return total


def _is_float32(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a GGUF file of any format has this tensor in float32: a vector, or a router."""
    return len(shape) == 1 or ".ffn_gate_inp." in name


def format_of(name: str, format: str, layers: int) -> str:
    """The format of the matrix `name` (GGUF's) in a file called `format`: Q4_K_M mixes two, by llama.cpp's rule."""
    if format != "Q4_K_M":
        return format
    if name == "output.weight":
        return "Q6_K"
    i = int(name.split(".")[1]) if name.startswith("blk.") else 0
    more_bits = i < layers // 8 or i >= 7 * layers // 8 or (i - layers // 8) % 3 == 2
    return "Q6_K" if more_bits and (".attn_v." in name or ".ffn_down" in name) else "Q4_K"


class Pool:
    """Random numbers, packed once in one format. `rows` cuts a matrix out of them: which numbers depends on its name alone."""

    def __init__(self, format: str, seed: int = 0):
        known = LAYOUTS[format]
        self._unit = max(BLOCK, known.elements)
        if known.is_rounded_quickly:
            values = np.random.default_rng(seed).standard_normal(_POOL_BLOCKS * BLOCK, np.float32) * np.float32(0.02)
            packed = pack(format, bf16_to_f32(f32_to_bf16(values)).reshape(-1, known.elements))  # what bfloat16 holds
        else:
            packed = random_rows(format, 1, _POOL_BLOCKS * self._unit, 0.02, seed)
        self.blocks = packed.reshape(_POOL_BLOCKS, -1)

    def rows(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """uint8 [O, row bytes] of the matrix `name` [O, I], [..., O, row bytes] of several; I: a multiple of 32 and of the blocks."""
        I = shape[-1]
        if I % self._unit:
            raise ValueError(f"shapes: {name} has rows of {I}, expected a multiple of {self._unit}")
        count, start = math.prod(shape) // self._unit, zlib.crc32(name.encode()) % _POOL_BLOCKS
        out = np.empty((count, self.blocks.shape[1]), np.uint8)
        done = 0
        while done < count:
            piece = self.blocks[start : start + count - done]
            out[done : done + len(piece)] = piece
            done, start = done + len(piece), 0
        return out.reshape(*shape[:-1], -1)


def write_config(config: dict[str, Any], folder: Path) -> Path:
    """A folder with config.json alone: enough for load_format="dummy"."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def write_folder(config: dict[str, Any], folder: Path) -> Path:
    """A Hugging Face folder in bfloat16: config.json and one safetensors file. ValueError for a shape with experts."""
    if "num_experts" in config:
        raise ValueError("shapes: a model with experts is written as GGUF alone, expected a dense shape")
    write_config(config, folder)
    header, end = {}, 0
    for name, _, shape in tensors(config):
        nbytes = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 64)
    pool = Pool("BF16")
    fresh = folder / "model.safetensors.part"
    with open(fresh, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, _, shape in tensors(config):
            ones = np.full(shape, 0x3F80, np.uint16) if len(shape) == 1 else None
            (pool.rows(name, shape) if ones is None else ones).tofile(file)
    fresh.replace(folder / "model.safetensors")
    return folder


def write_gguf(config: dict[str, Any], path: Path, format: str) -> Path:
    """One GGUF file, all matrices as `format` (of FORMATS) or in its mix, vectors and routers as F32."""
    layers = config["num_hidden_layers"]
    formats = {name: format_of(name, format, layers) for _, name, shape in tensors(config) if not _is_float32(name, shape)}
    pools = {one: Pool(one) for one in (*set(formats.values()), "BF16")}
    names = {theirs: name for theirs, name, _ in tensors(config)}

    def rows(theirs: str, shape: tuple[int, ...]) -> np.ndarray:
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        if names[theirs] not in formats:
            return bf16_to_f32(pools["BF16"].rows(theirs, shape).view(np.uint16))
        return pools[formats[names[theirs]]].rows(theirs, shape)

    return _write_tensors(config, path, format, formats, rows)


def write_gguf_of(folder: Path, path: Path) -> Path:
    """A Hugging Face folder in bfloat16, one safetensors file, as a GGUF file of the same numbers, without its tokenizer."""
    config = json.loads((folder / "config.json").read_text())
    data = np.fromfile(folder / "model.safetensors", np.uint8)
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:start].tobytes())

    for theirs, _, shape in tensors(config):
        if (entry := header[theirs])["dtype"] != "BF16" or tuple(entry["shape"]) != shape:
            raise ValueError(f"shapes: {theirs} is {entry['dtype']} {entry['shape']}, expected BF16 {list(shape)}")

    def rows(theirs: str, shape: tuple[int, ...]) -> np.ndarray:
        first, end = header[theirs]["data_offsets"]
        values = data[start + first : start + end]
        return bf16_to_f32(values.view(np.uint16)) if len(shape) == 1 else values.reshape(shape[0], -1)

    formats = {name: "BF16" for _, name, shape in tensors(config) if len(shape) > 1}
    return _write_tensors(config, path, "BF16", formats, rows)


def _write_tensors(config: dict[str, Any], path: Path, format: str, formats: dict[str, str], rows: Rows) -> Path:
    """The file: `rows(theirs, shape)` has float32 of a tensor without a format, else bytes [..., O, row bytes] in that of its GGUF name."""
    import gguf

    arch = config["model_type"].replace("_", "")
    fresh = path.with_suffix(".part")
    writer = gguf.GGUFWriter(fresh, arch)
    _write_metadata(writer, config, format)
    extra = _rope_divisors(config)
    if extra is not None:
        writer.add_tensor_info("rope_freqs.weight", extra.shape, extra.dtype, extra.nbytes)
    for _, name, shape in tensors(config):
        if name not in formats:
            writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * math.prod(shape))
        else:
            row, kind = row_bytes(formats[name], shape[-1]), gguf.GGMLQuantizationType[formats[name]]
            writer.add_tensor_info(name, (*shape[:-1], row), np.dtype(np.uint8), math.prod(shape[:-1]) * row, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if extra is not None:
        writer.write_tensor_data(extra)
    for theirs, _, shape in tensors(config):
        data = rows(theirs, shape)
        writer.write_tensor_data(_as_pairs(data, theirs, config) if arch == "llama" else data)
    writer.close()
    fresh.replace(path)
    return path


def _as_pairs(rows: np.ndarray, name: str, config: dict[str, Any]) -> np.ndarray:
    """q and k rows of each head from (first halves, second halves) to neighbouring pairs; other rows as they are."""
    if ".q_proj." not in name and ".k_proj." not in name:
        return rows
    heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
    return np.ascontiguousarray(rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2)).reshape(rows.shape)


def _rope_divisors(config: dict[str, Any]) -> np.ndarray | None:
    """What each frequency is divided by, float32 [D/2]: 1 for short wavelengths, `factor` for long ones, blended between."""
    scaling = config.get("rope_scaling")
    if scaling is None:
        return None
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    wavelength = 2 * math.pi * config["rope_theta"] ** (np.arange(0, config["head_dim"], 2) / config["head_dim"])
    share = np.clip((scaling["original_max_position_embeddings"] / wavelength - low) / (high - low), 0, 1)
    inverse: np.ndarray = (1 / ((1 - share) / factor + share)).astype(np.float32)
    return inverse


def _write_metadata(writer: Any, config: dict[str, Any], format: str) -> None:
    import gguf

    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    types = gguf.LlamaFileType.__members__
    writer.add_file_type(
        next((types[name] for name in (f"MOSTLY_{format}", f"MOSTLY_{format}_M") if name in types), gguf.LlamaFileType.GUESSED)
    )
    _write_vocabulary(writer, config["vocab_size"])


def _write_vocabulary(writer: Any, V: int) -> None:
    """The least that llama.cpp accepts as byte-level BPE: every byte's letter, one merge, and names without meaning."""
    import gguf

    letters = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]  # the 256 bytes' stand-ins
    tokens = ["<unk>", "<s>", "</s>", *letters, "aa"]
    control = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens + [f"[{i}]" for i in range(len(tokens), V)])
    writer.add_token_types(control + [gguf.TokenType.UNUSED] * (V - len(tokens)))
    writer.add_token_merges(["a a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def checkpoint(shape: str, format: str, folder: Path) -> Path:
    """The Hugging Face folder (format "folder") or GGUF file of a named shape inside `folder`, written if it is not there yet."""
    if shape not in SHAPES:
        raise SystemExit(f"shapes: there is no shape {shape!r}; there are {', '.join(SHAPES)}")
    config = SHAPES[shape]
    if format == "folder":
        target = folder / shape
        return target if (target / "model.safetensors").is_file() else write_folder(config, target)
    if format not in FORMATS:
        raise SystemExit(f"shapes: there is no format {format!r}; there are {', '.join(FORMATS)}")
    target = folder / f"{shape}-{format}.gguf"
    folder.mkdir(parents=True, exist_ok=True)
    return target if target.is_file() else write_gguf(config, target, format)


def parse_formats(text: str) -> list[str]:
    """ "bf16,q8_0" -> ["BF16", "Q8_0"]; argparse's error names an unknown one."""
    formats = [word.strip().upper() for word in text.split(",")]
    if wrong := [f for f in formats if f not in FORMATS]:
        raise argparse.ArgumentTypeError(f"no format {', '.join(wrong)}; there are {', '.join(FORMATS)}")
    return formats


def main() -> None:
    parser = argparse.ArgumentParser(description="writes checkpoints of random numbers")
    parser.add_argument("--shape", choices=SHAPES, default="tinyllama-1.1b")
    parser.add_argument("--formats", type=parse_formats, default=["BF16", "Q8_0", "Q4_0"])
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    if options.shape in DENSE:
        print(checkpoint(options.shape, "folder", options.folder))
    for format in options.formats:
        print(checkpoint(options.shape, format, options.folder))


if __name__ == "__main__":
    main()
