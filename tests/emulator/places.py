"""Where the emulator lies, and where it keeps what it has compiled."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
FOLDER = Path(tempfile.gettempdir()) / f"tinyvllm-test-emulator-{os.getuid()}"
