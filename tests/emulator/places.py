"""The folder of the emulator, and the folder of compiled kernels."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
FOLDER = Path(tempfile.gettempdir()) / f"tinyvllm-test-emulator-{os.getuid()}"
