"""Which compiler is taken: the user's, a recent clang, the wheel's, or a line that says what to install."""

import os
import stat

import pytest

from tinyvllm.backends.cpu import toolchain
from tinyvllm.errors import TinyvllmError
from tinyvllm.storage import folders


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """No CC and an empty PATH folder to put compilers into."""
    monkeypatch.setenv("CC", "")  # so that what a test sets is undone
    monkeypatch.delenv("CC")
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def put_clang(folder, says):
    clang = folder / "bin" / "clang"
    clang.write_text(f"#!/bin/sh\necho '{says}'\n")
    clang.chmod(clang.stat().st_mode | stat.S_IXUSR)
    return str(clang)


RECENT = ["clang version 16.0.6", "Debian clang version 19.1.7 (3)", "Apple clang version 15.0.0 (clang-1500.3.9.4)"]


@pytest.mark.parametrize("says", RECENT)
def test_a_recent_clang_is_taken(bare, says):
    path = put_clang(bare, says)
    assert toolchain.provide_compiler(bare / "cache") == os.environ["CC"] == path


@pytest.mark.parametrize("says", ["clang version 14.0.6", "Apple clang version 14.0.3", "something else"])
def test_an_old_clang_is_passed_over_for_the_wheel(bare, says):
    put_clang(bare, says)
    zig, clang, *headers = toolchain.compiler_command()
    assert zig.endswith("zig") and os.access(zig, os.X_OK) and clang == "clang" and headers[0] == "-isystem" and os.path.isdir(headers[1])
    chosen = toolchain.provide_compiler(bare / "cache")
    assert chosen == str(bare / "cache" / "zig-clang") and os.access(chosen, os.X_OK)


def test_the_users_choice_is_kept(bare, monkeypatch):
    monkeypatch.setenv("CC", "mine")
    assert toolchain.compiler_command() == ["mine"] and toolchain.has_compiler()
    assert toolchain.provide_compiler(bare / "cache") == "mine"


GCC = "gcc (Debian 12.2.0-14) 12.2.0\nThis is free software; see the source for copying conditions.  There is NO"


def test_gcc_is_passed_over_and_that_is_told(bare, monkeypatch, caplog):
    """Images and environments name it in CC for other builds; it cannot compile our kernels."""
    monkeypatch.setattr(folders, "_logged", set())
    gcc = put_clang(bare, GCC).replace("clang", "gcc")
    (bare / "bin" / "clang").rename(gcc)
    monkeypatch.setenv("CC", gcc)
    path = put_clang(bare, RECENT[0])
    assert toolchain.compiler_command() == [path] and toolchain.has_compiler()
    assert f"CC={gcc} is GCC" in caplog.text
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    os.unlink(path)
    assert not toolchain.has_compiler()
    with pytest.raises(TinyvllmError, match=f"CC={gcc} is GCC.*pip install ziglang"):
        toolchain.compiler_command()


def test_the_wheels_script_compiles(bare):
    import subprocess

    chosen = toolchain.provide_compiler(bare / "cache")
    out = bare / "x.o"
    subprocess.run([chosen, "-c", "-x", "c", "-", "-o", str(out)], input=b"int f(void) { return 7; }", check=True, env={"HOME": str(bare)})
    assert out.stat().st_size > 0


def test_nothing_to_compile_with_is_one_clear_line(bare, monkeypatch):
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    assert not toolchain.has_compiler()
    with pytest.raises(TinyvllmError, match="pip install ziglang"):
        toolchain.compiler_command()
