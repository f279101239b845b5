"""The laboratory of speculative decoding: sweeps, their measurement, and what they show. `tinyvllm lab` is its command line.

Its files import no tensors but `engine_target.py` and `traffic.py`; the fake model runs a whole sweep without them.
"""
