"""The tiny model of the tests with marks of thinking: as special tokens, as added tokens that are text, or as plain text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.numpy import load_file, save_file

THINK, UNTHINK = 261, 262  # rows that the tiny model has to spare
TEMPLATE = (
    "{% if tools %}Write <tool_call>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% elif open_thoughts is not defined or open_thoughts %}<think>\n{% endif %}{% endif %}"
)


def write_thinking_model(source: Path, folder: Path, marks: str) -> Path:
    """A copy of the model in `source`. marks: "special" (Mistral's way), "added" (Qwen's and DeepSeek's) or "text" (Nemotron's).

    It closes its reasoning after a while, if one token does that.
    """
    from tokenizers import AddedToken, Tokenizer

    shutil.copytree(source, folder, dirs_exist_ok=True)
    if marks != "text":
        path = str(folder / "tokenizer.json")
        tokenizer = Tokenizer.from_file(path)
        added = [AddedToken(mark, special=marks == "special", normalized=False) for mark in ("<think>", "</think>")]
        (tokenizer.add_special_tokens if marks == "special" else tokenizer.add_tokens)(added)
        assert (tokenizer.token_to_id("<think>"), tokenizer.token_to_id("</think>")) == (THINK, UNTHINK)
        tokenizer.save(path)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"][UNTHINK] *= 24
    save_file(tensors, path, metadata={"format": "pt"})
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    return folder
