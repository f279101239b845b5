"""The container file builds, and its image serves: tests/image.sh, where a machine can run it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOOLS = ("debootstrap", "buildah", "podman", "catatonit", "curl")
ROOM = 4 << 30  # bytes: the base, the build's layers and the image
NO_PACKAGES = 75

pytestmark = pytest.mark.long


def test_the_image_builds_answers_and_ends(tmp_path: Path) -> None:
    if missing := [name for name in TOOLS if shutil.which(name) is None]:
        pytest.skip(f"needs {', '.join(missing)}")
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("needs Linux and root, for the namespaces that the image runs in")
    if shutil.disk_usage(tmp_path).free < ROOM:
        pytest.skip(f"needs {ROOM >> 30} GiB of disk")
    try:
        done = subprocess.run(["bash", "tests/image.sh", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=3600)
    finally:
        shutil.rmtree(tmp_path, ignore_errors=True)  # gigabytes
    if done.returncode == NO_PACKAGES:
        pytest.skip("debootstrap cannot fetch Debian's packages here")
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    answer, ended = done.stdout.splitlines()[-2:]
    assert '"finish_reason"' in answer and ended == "ended with 0"
