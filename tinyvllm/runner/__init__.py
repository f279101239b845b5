"""The model on a device: weights, cache and inputs, and the captured steps that run it."""

import tinyvllm.bridge  # noqa: F401  before any module imports tinygrad: the bridge imports it without what is not used
