"""What the server may import from the engine; tests/test_house.py checks that it imports from nowhere else."""

from tinyvllm.engine.async_llm import AsyncLLM
from tinyvllm.engine.frontend import plan_memory
from tinyvllm.engine.prompt import encode_piece
from tinyvllm.engine.segments import Segment, SegmentRoomError

__all__ = ["AsyncLLM", "Segment", "SegmentRoomError", "encode_piece", "plan_memory"]
