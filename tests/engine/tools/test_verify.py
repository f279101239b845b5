"""`verify`: kernels that are right are found right, and a fault that is planted in one is found, named and told by the exit code."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tinyvllm import LLM, cli
from tinyvllm.errors import ArgumentError, ModelError
from tinyvllm.quant.formats import FORMATS

ROOT = Path(__file__).parents[3]
PROMPTS = ["once upon a time in a wood", "two", "and a third one"]
OPTIONS = {"device": "CPU", "max_num_seqs": 4, "max_model_len": 128, "num_blocks": 8}


def test_every_place_is_compared_and_found_equal(tiny_model):
    from tinyvllm.engine.tools.verify import verify

    with LLM(tiny_model, **OPTIONS) as llm:
        report = verify(llm.engine, PROMPTS, steps=3)
        assert [place.name for place in report.places] == ["embed", "layer 0", "layer 1", "head"] and report.format == "F32"
        assert {"matmul", "norm_gate_up_silu", "norm_head", "norm_qkv_rope_store"} <= set(report.kernels)
        assert report.fine and report.first is None and report.culprits == [] and report.tolerance == FORMATS["F32"].tolerance
        assert all(place.own <= place.largest * 1e3 < 1 for place in report.places) and report.places[1].own > 0, "two ways of adding up"
        ids = sum(len(llm.engine.tokenizer.encode(text)) for text in PROMPTS)
        # the prompts, the third of which ran with two decodes; the rest of the shared one; steps of four; one alone
        assert len(report.kl) == ids + 2 + 2 + 3 * 4 + 1 - 1 and report.agreeing == len(report.kl)
        assert 0 <= report.kl_mean < 1e-8


@pytest.mark.long
def test_the_bundled_models_attention_in_all_kinds_of_steps():
    from tinyvllm.engine.tools.verify import verify

    with LLM(**OPTIONS | {"max_model_len": 64}) as llm:
        report = verify(llm.engine, ["Once upon a time there was a fox that lived in a forest", "One"], steps=1)
    assert {"attention_decode", "attention_prefill", "embed"} <= set(report.kernels) and report.format == "BF16"
    assert report.fine and {place.kind for place in report.places} & {"mixed", "prefill", "decode"}


def test_what_does_not_fit_is_refused(tiny_model):
    from tinyvllm.engine.tools.verify import verify

    with LLM(tiny_model, **OPTIONS) as llm:
        with pytest.raises(ArgumentError, match=r"prompt 1 has 201 tokens; expected 1 to 118, .*--max-model-len"):
            verify(llm.engine, ["a", "b" * 200])
        with pytest.raises(ArgumentError, match="4 prompts; expected 1 to 3"):
            verify(llm.engine, ["a"] * 4)


def test_broken_weights_are_no_fault_of_a_kernel(tiny_model, tmp_path):
    from safetensors.numpy import load_file, save_file

    from tinyvllm.engine.tools.verify import verify

    shutil.copytree(tiny_model, tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights["model.norm.weight"][3] = np.nan
    save_file(weights, str(tmp_path / "model" / "model.safetensors"))
    with LLM(tmp_path / "model", **OPTIONS) as llm, pytest.raises(ModelError, match="the reference itself gives no finite logits"):
        verify(llm.engine, ["a"], steps=0)


@pytest.mark.long
def test_a_wrong_constant_in_a_kernel_is_found_and_named(tiny_model, tmp_path):
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels")
    source = tmp_path / "kernels" / "cpu" / "include" / "activations.h"
    text, right = source.read_text(), "silu(v16 x) { return v16_div(x, v16_add(v16_set(1.0f)"
    assert right in text
    source.write_text(text.replace(right, right.replace("1.0f", "1.02f")))
    arguments = ["verify", str(tiny_model), "--device", "CPU", "--steps", "1", "--prompt", PROMPTS[0], "--quiet"]
    code = (
        "import sys; from pathlib import Path; from tinyvllm.backends import source\n"
        f"source.kernels_folder = lambda: Path({str(tmp_path / 'kernels')!r})\n"
        f"from tinyvllm.cli import main; sys.exit(main({arguments!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stderr
    assert "layer 0" in done.stdout and "<- beyond the tolerance" in done.stdout
    assert "DIVERGES: layer 0 is the first" in done.stdout and "it is well with norm_gate_up_silu" in done.stdout, done.stdout


@pytest.mark.long
def test_a_nan_of_a_kernel_is_the_worst_of_all(tiny_model, monkeypatch):
    from tinyvllm.backends.registry import BACKENDS
    from tinyvllm.engine.tools.verify import verify

    with LLM(tiny_model, **OPTIONS) as llm:
        backend = BACKENDS["CPU"]
        kept = backend.gate_up_silu
        monkeypatch.setattr(backend, "gate_up_silu", lambda *arguments: kept(*arguments) * float("nan"))
        report = verify(llm.engine, PROMPTS[:2], steps=1)
    assert not report.fine and report.first == "layer 0" and report.culprits == ["norm_gate_up_silu"]
    assert report.places[1].own == float("inf") == report.places[1].largest
    record = json.loads(json.dumps(report.record(), allow_nan=False))
    assert record["first"] == "layer 0" and record["places"][1]["own"] is None and record["kl_mean"] is None


def test_the_command(tiny_model, capsys, monkeypatch):
    model = [str(tiny_model), "--device", "CPU", "--steps", "1", "--prompt", "x", "--json"]
    assert cli.main(["verify", *model]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["fine"] and record["top1_agreement"] == 1 and len(record["places"]) == 4 and len(record["kl"]) == 3
    assert cli.main(["verify", *model, "--tolerance", "1e-30"]) == 1, "what is asked for counts"
    assert json.loads(capsys.readouterr().out)["first"] == "layer 0"
    monkeypatch.setenv("TINYVLLM_KERNELS", "all=ref")
    assert cli.main(["verify", *model[:-1], "--quiet"]) == 0
    assert "nothing to compare" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--steps", "-1"], "--steps"), (["--tolerance", "0"], "--tolerance"), (["--prompt", ""], "--prompt"), (["--model", "x"], "--model")],
)
def test_arguments_that_are_refused(capsys, arguments, words):
    assert cli.main(["verify", *arguments]) == 2
    assert words in capsys.readouterr().err
