"""The system_fingerprint of a running engine. It needs a digest of the whole model, which no start waits for."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from hashlib import blake2b
from typing import TYPE_CHECKING

from tinyvllm.errors import ModelError
from tinyvllm.version import VERSION

if TYPE_CHECKING:
    from tinyvllm.engine.engine import Engine

log = logging.getLogger("tinyvllm")

SMALL_BYTES = 64 << 20  # of weights: read at once, in less than a tenth of a second


class Fingerprint:
    """The version, and a digest of the model and its kernels: answers with one seed may differ only where this differs.

    A small model, or one whose digest is remembered, has it at once. Another is read by one thread in the background, at 1 to 1.5 GB/s.
    """

    def __init__(self, engine: Engine):
        from tinyvllm.engine.prefix_store import identity  # tinygrad comes with it
        from tinyvllm.storage.digests import Stopped

        self.value: str | None = None  # until the digest is known, and for a model that cannot be read any more
        self._checkpoint, self._engine = engine.runner.checkpoint, identity(engine.runner, engine.config, "")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read_model, name="tinyvllm-fingerprint", daemon=True)
        size = sum(record.nbytes for record in self._checkpoint.tensors.values())
        try:
            self._compute(lambda: size > SMALL_BYTES)
        except Stopped:
            with contextlib.suppress(RuntimeError):  # no thread for want of memory: no fingerprint
                self._thread.start()

    def _compute(self, stopped: Callable[[], bool]) -> None:
        from tinyvllm.weights.identity import weights_digest

        try:
            model = weights_digest(self._checkpoint, stopped).encode() + self._engine
        except ModelError as error:
            log.warning("system_fingerprint is null: %s", error)
        else:
            self.value = f"tinyvllm-{VERSION}-{blake2b(model, digest_size=4).hexdigest()}"

    def _read_model(self) -> None:
        from tinyvllm.storage.digests import Stopped

        with contextlib.suppress(Stopped):
            self._compute(self._stop.is_set)

    def close(self) -> None:
        """End the reading in the background."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
