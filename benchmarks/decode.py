"""Captured decode against tinygrad's own LLM on the same weights, and the host's share of a step.

Decoding one sequence streams every weight once a token, so its roof is read bandwidth / weight bytes; batching shares that stream. What
is timed: steady steps at a short context. `host` is everything in a step but the kernels: scheduling, laying out the batch, launching,
reading the tokens, turning them into outputs: the processor time of the engine's thread.

    python -m benchmarks.decode [--layers 12 --dim 768 --hidden 3072 --heads 12 --vocab 32000] [--steps 12 --rounds 5]

Where transformers is installed (make test-peers) it takes part too: same shapes, bf16, PyTorch on all cores, a dense cache.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import medians, record


def write_config(folder: Path, shape: argparse.Namespace) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": shape.dim, "intermediate_size": shape.hidden,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads or shape.heads,
        "vocab_size": shape.vocab, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def ours(folder: Path) -> Any:
    from tinyvllm import LLM

    return LLM(folder, load_format="dummy", dtype="bfloat16", max_model_len=512, max_num_seqs=8, skip_tokenizer_init=True)


def theirs(llm: Any) -> Any:
    """tinygrad.llm's Transformer around the very same tensors."""
    from tinygrad import nn
    from tinygrad.llm.model import Transformer, TransformerConfig

    from tinyvllm.ops.launch import uninitialized
    from tinyvllm.runner.runner import place

    mine = llm.engine.runner.model
    c = mine.config
    config = TransformerConfig(**{name: getattr(c, name) for name in TransformerConfig.__dataclass_fields__} | {"max_context": 512})
    with uninitialized():
        model = Transformer(config)
    place(model, nn.state.get_state_dict(mine))
    return model


def transformers_decoder(folder: Path, batch: int) -> Callable[[int], None] | None:
    """Greedy decoding with transformers on random weights of the same shapes; None where it is not installed."""
    if importlib.util.find_spec("transformers") is None:
        return None
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    token, past = torch.zeros((batch, 16), dtype=torch.long), transformers.DynamicCache(config=config)

    @torch.inference_mode()
    def steps(count: int) -> None:
        nonlocal token
        for _ in range(count):
            logits = model(input_ids=token, past_key_values=past, use_cache=True).logits
            token = logits[:, -1:].argmax(-1)

    steps(4)
    return steps


class Decoding:
    """B sequences in the middle of their answers; `steps` runs the engine's own loop."""

    def __init__(self, llm: Any, batch: int):
        from tinyvllm import SamplingParams

        self.engine = llm.engine
        for b in range(batch):
            params = SamplingParams(temperature=0.0, max_tokens=480, ignore_eos=True)
            self.engine.add(f"{batch}-{b}", [(7 * b + i) % 1000 for i in range(16)], params)
        for _ in range(4):
            self.engine.step()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    def host_time(self, count: int) -> float:
        """Median processor seconds of the engine's thread in a step. Waiting for the device takes none; kernels run in other threads."""
        hosts = []
        for _ in range(count):
            start = time.thread_time()
            self.engine.step()
            hosts.append(time.thread_time() - start)
        return median(hosts)

    def close(self) -> None:
        for request_id in list(self.engine._requests):
            self.engine.abort(request_id)
        self.engine.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, value in (("layers", 12), ("dim", 768), ("hidden", 3072), ("heads", 12), ("kv-heads", 0), ("vocab", 32000)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), options)
        llm = ours(Path(folder))
        torch_1, torch_8 = (transformers_decoder(Path(folder), batch) for batch in (1, 8))
    peer = theirs(llm).generate(list(range(16)))
    for _ in range(6):
        next(peer)
    one = Decoding(llm, 1)
    contest: dict[str, Callable[[], object]] = {"ours": lambda: one.steps(options.steps)}
    contest["tinygrad.llm"] = lambda: [next(peer) for _ in range(options.steps)]
    if torch_1 is not None:
        contest["transformers"] = lambda: torch_1(options.steps)
    seconds = medians(contest, options.rounds)
    host_1 = one.host_time(4 * options.steps)
    one.close()
    eight = Decoding(llm, 8)
    contest = {"ours, batch 8": lambda: eight.steps(options.steps)}
    if torch_8 is not None:
        contest["transformers, batch 8"] = lambda: torch_8(options.steps)
    seconds |= medians(contest, options.rounds)
    host_8 = eight.host_time(4 * options.steps)
    eight.close()
    bandwidth, weights = llm.engine.read_bandwidth(), llm.engine.model_bytes_per_token
    rate = {name: options.steps / value for name, value in seconds.items()}
    record(
        "decode",
        {
            "shape": {k: v for k, v in vars(options).items() if k not in ("steps", "rounds")},
            "weight_bytes": weights,
            "read_GBps": round(bandwidth / 1e9, 1),
            "roof_tok_s": round(bandwidth / weights, 1),
            "tok_s": round(rate["ours"], 2),
            "tinygrad_llm_tok_s": round(rate["tinygrad.llm"], 2),
            "transformers_tok_s": round(rate["transformers"], 2) if torch_1 else None,
            "transformers_batch8_tok_s": round(8 * rate["transformers, batch 8"], 2) if torch_8 else None,
            "ratio": round(rate["ours"] / rate["tinygrad.llm"], 3),
            "batch8_tok_s": round(8 * rate["ours, batch 8"], 2),
            "batch8_over_batch1": round(8 * rate["ours, batch 8"] / rate["ours"], 2),
            "host_ms_batch1": round(host_1 * 1e3, 3),
            "host_ms_batch8": round(host_8 * 1e3, 3),
        },
    )


if __name__ == "__main__":
    main()
