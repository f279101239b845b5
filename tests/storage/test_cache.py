"""The cache folder: what is read back is what was written, or nothing; a folder of others is refused; a full disk is one line."""

from __future__ import annotations

import errno
import logging
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.storage.attacks import ATTACKS
from tinyvllm.storage import cache as module
from tinyvllm.storage import folders
from tinyvllm.storage.cache import CacheFolder, open_cache

NAME, CONTENT = "kernels/copy-0123.o", bytes(range(256)) * 20


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test logs as a new process does."""
    monkeypatch.setattr(folders, "_logged", set())
    module._open_cache.cache_clear()


@pytest.fixture
def folder(tmp_path: Path) -> CacheFolder:
    return open_cache(tmp_path / "cache")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_what_was_written_is_read_and_is_private(folder, tmp_path, caplog):
    assert folder.read(NAME) is None
    assert folder.write(NAME, CONTENT) and folder.write("autotune.json", b"{}") and folder.write("kernels/none", b"")
    assert (folder.read(NAME), folder.read("autotune.json"), folder.read("kernels/none")) == (CONTENT, b"{}", b"")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert modes == {"cache": 0o700, "kernels": 0o700, "copy-0123.o": 0o600, "none": 0o600, "autotune.json": 0o600}
    assert lines(caplog) == []


@pytest.mark.parametrize("attack", ATTACKS)
def test_damage_is_one_line_and_built_again(attack, folder, caplog):
    for name in (NAME, "kernels/other.o"):
        assert folder.write(name, CONTENT[: len(name) * 100])
    path = folder.path / NAME
    ATTACKS[attack](path)
    assert folder.read(NAME) is None
    (line,) = lines(caplog)
    assert str(path) in line and "built again" in line
    assert folder.write(NAME, CONTENT) and folder.read(NAME) == CONTENT and len(lines(caplog)) == 1


def test_every_bit_counts(folder):
    """Whichever bit of the file differs, header and digest included."""
    assert folder.write(NAME, b"an object")
    path = folder.path / NAME
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        assert folder.read(NAME) is None, f"bit {bit}"


def test_many_damaged_files_are_one_line(folder, caplog):
    for i in range(20):
        folder.write(f"kernels/{i}", CONTENT)
        (folder.path / f"kernels/{i}").write_bytes(b"")
    assert [folder.read(f"kernels/{i}") for i in range(20)] == [None] * 20
    assert len(lines(caplog)) == 1


def test_a_file_of_another_user_is_not_read(folder, monkeypatch, caplog):
    folder.write(NAME, CONTENT)
    monkeypatch.setattr(os, "getuid", lambda: (folder.path / NAME).stat().st_uid + 1)
    if (folder.path / NAME).stat().st_uid == 0:  # root's files are believed: root can replace Python itself
        assert folder.read(NAME) == CONTENT
        os.chown(folder.path / NAME, 4321, -1)
    assert folder.read(NAME) is None
    (line,) = lines(caplog)
    assert "belongs to another user" in line


def refused(caplog: pytest.LogCaptureFixture, path: Path, reason: str) -> CacheFolder:
    """The temporary folder in place of a refused one, which is one line."""
    cache = open_cache(path)
    assert cache.temporary and cache.path != path and cache.write(NAME, CONTENT) and cache.read(NAME) == CONTENT
    assert stat.S_IMODE(cache.path.stat().st_mode) == 0o700
    (line,) = lines(caplog)
    assert str(path) in line and reason in line and str(cache.path) in line
    return cache


def test_a_folder_that_all_can_write_to_is_refused(tmp_path, caplog):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    refused(caplog, tmp_path / "cache", "every user can write to it")
    assert not any((tmp_path / "cache").iterdir())


def test_a_folder_that_another_user_can_replace_is_refused(tmp_path, caplog):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    refused(caplog, tmp_path / "open" / "cache", "put another folder in its place")


def test_a_sticky_parent_is_fine(tmp_path, caplog):
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    assert open_cache(tmp_path / "tmp" / "cache").path == tmp_path / "tmp" / "cache" and lines(caplog) == []


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch, caplog):
    (tmp_path / "cache").mkdir()
    if os.getuid() == 0:
        os.chown(tmp_path / "cache", 4321, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: (tmp_path / "cache").stat().st_uid + 1)
    refused(caplog, tmp_path / "cache", "belongs to another user")


@pytest.mark.parametrize("place", ["/proc/cache/tinyvllm", "/dev/null/cache"])
def test_a_folder_that_cannot_be_made_is_one_line(place, caplog):
    refused(caplog, Path(place), "is not used")


def test_a_file_at_the_folders_place(tmp_path, caplog):
    (tmp_path / "cache").write_text("")
    refused(caplog, tmp_path / "cache", "is not used")


def test_no_folder_at_all_is_no_reason_to_stop(monkeypatch, caplog):
    monkeypatch.setattr(module, "temporary_folder", lambda: None)
    cache = open_cache(Path("/dev/null/cache"))
    assert cache.path is None and not cache.write(NAME, CONTENT) and cache.read(NAME) is None
    (line,) = lines(caplog)
    assert "nothing is kept" in line


def test_an_older_folder_is_made_private(tmp_path, caplog):
    """Older versions made 0755, and 0775 where the umask is 002."""
    for mode in (0o755, 0o775):
        (tmp_path / "cache").mkdir(exist_ok=True)
        (tmp_path / "cache").chmod(mode)
        assert open_cache(tmp_path / "cache").path == tmp_path / "cache"
        assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
        module._open_cache.cache_clear()
    assert lines(caplog) == []


def test_a_linked_folder_is_used_where_it_leads(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "disk")
    assert open_cache(tmp_path / "cache").path == tmp_path / "disk"


def test_a_file_at_a_rooms_place_is_removed(folder, caplog):
    (folder.path / "kernels").write_text("")
    assert folder.write(NAME, CONTENT) and folder.read(NAME) == CONTENT and len(lines(caplog)) == 1


def test_a_removed_folder_is_made_again(folder):
    folder.write(NAME, CONTENT)
    (folder.path / NAME).unlink()
    (folder.path / "kernels").rmdir()
    assert folder.read(NAME) is None and folder.write(NAME, CONTENT)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG, errno.EROFS, errno.EDQUOT])
def test_a_write_that_fails_is_one_line_and_leaves_nothing(code, folder, monkeypatch, caplog):
    def fail(self: Path, target: Path) -> None:
        raise OSError(code, os.strerror(code))

    folder.write("kernels/before", CONTENT)
    monkeypatch.setattr(Path, "replace", fail)
    assert not folder.write(NAME, CONTENT) and not folder.write("kernels/another", CONTENT)
    (line,) = lines(caplog)
    assert os.strerror(code) in line and "continuing without it" in line
    assert [path.name for path in (folder.path / "kernels").iterdir()] == ["before"]


def test_a_limit_on_file_sizes_is_one_line(tmp_path):
    """A real limit, in a process of its own: SIGXFSZ must not end it."""
    code = (
        "import resource, sys, pathlib\nfrom tinyvllm.storage.cache import open_cache\nfolder = open_cache(pathlib.Path(sys.argv[1]))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "print(folder.write('kernels/a', b'x' * 5000), folder.write('kernels/b', b'x' * 5000), folder.write('kernels/c', b'x'))"
    )
    # -B: under the limit Python would leave truncated .pyc files, which the next import fails on
    done = subprocess.run([sys.executable, "-B", "-c", code, str(tmp_path / "cache")], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False False True\n" and done.stderr.count("\n") == 1 and "File too large" in done.stderr, done.stderr
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 1000


@pytest.mark.parametrize(("variable", "folder"), [("TINYVLLM_CACHE", "named"), ("TMPDIR", f"tinyvllm-{os.getuid()}")])
def test_a_user_without_home_and_name(tmp_path, variable, folder):
    """The folder that TINYVLLM_CACHE names; without it one of this user in TMPDIR. HOME is not set, and no table of users has an entry."""
    code = (
        "import pwd\ndef none(uid): raise KeyError(uid)\npwd.getpwuid = none\n"
        "from tinyvllm.storage.cache import open_cache\nprint(open_cache().path)"
    )
    named = tmp_path / "named" if variable == "TINYVLLM_CACHE" else tmp_path
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", ""), variable: str(named)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == (f"{tmp_path / folder}\n", "")
