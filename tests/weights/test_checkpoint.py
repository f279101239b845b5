"""Finding a model on disk, and the one line for every way of not finding one."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tinyvllm.errors import FormatError, ModelError
from tinyvllm.weights.checkpoint import open_checkpoint


def gguf_file(path, **words):
    keys = b"".join(struct.pack("<Q", len(k)) + k.encode() + struct.pack("<IQ", 8, len(v)) + v.encode() for k, v in words.items())
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(words)) + keys)
    return path


def refused(path, kind=ModelError):
    with pytest.raises(kind) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    save_file({"a": np.ones((2, 3), np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


def test_opens_a_folder(folder):
    found = open_checkpoint(folder)
    assert (found.kind, found.path, found.folder) == ("safetensors", folder, folder)
    assert found.config == {"model_type": "llama", "hidden_size": 64} and found.tensors["a"].shape == (2, 3)
    assert open_checkpoint(str(folder)).path == folder


def test_opens_shards_by_their_index(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    assert list(open_checkpoint(folder).tensors) == ["a"]  # a lone file of another name needs no index
    save_file({"b": np.ones(1, np.float32)}, folder / "model-00002-of-00002.safetensors")
    assert "holds 2 safetensors files but no model.safetensors.index.json" in refused(folder)
    weight_map = {"a": "model-00001-of-00001.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert set(open_checkpoint(folder).tensors) == {"a", "b"}


def test_opens_gguf_by_file_and_by_folder(tmp_path):
    file = gguf_file(tmp_path / "M.GGUF", x="y")
    for path in (file, tmp_path):
        found = open_checkpoint(path)
        assert (found.kind, found.path, found.config, found.folder) == ("gguf", file, {"x": "y"}, tmp_path)
    gguf_file(tmp_path / "n.gguf")
    assert refused(tmp_path).endswith("holds several GGUF models, give the path of one: M.GGUF, n.gguf")


def test_paths_that_are_no_model(tmp_path, folder):
    assert "no such file or folder: " + str(tmp_path / "none") in refused(tmp_path / "none")
    assert "no such file or folder" in refused(tmp_path / "none.gguf")
    assert "give the folder with it" in refused(folder / "model.safetensors")
    assert "neither a model folder nor a .gguf file" in refused(folder / "config.json")
    assert "cannot read nnn" in refused(Path("n" * 5000))
    (empty := tmp_path / "empty").mkdir()
    assert "no model.safetensors and no .gguf file; it is empty" in refused(empty)
    (empty / "README.md").touch()
    assert "it holds README.md" in refused(empty)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_refused_with_the_way_out(tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"x")
    for path in (tmp_path, tmp_path / name):
        assert name in refused(path)
    assert "convert it to safetensors" in refused(tmp_path)


def test_config_must_be_there_and_be_an_object(folder):
    for text in ("[1]", "{", "", "\x00", "[" * 100_000):
        (folder / "config.json").write_text(text)
        assert "config.json" in refused(folder, FormatError)
    (folder / "config.json").unlink()
    assert "no config.json" in refused(folder)
