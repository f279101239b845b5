"""Latency against load of any OpenAI server, as `tinyvllm bench serve` reports it."""
