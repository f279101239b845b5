"""The process of a rank above 0: loads its part of the model, then runs the steps that rank 0 announces and passes them on.

python -m tinyvllm.runner.rank SOCKET MEMORY    two open file descriptors, inherited from rank 0
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from typing import IO, Any

from tinyvllm.config.engine import EngineConfig
from tinyvllm.config.switches import cache_folder
from tinyvllm.distributed.memory import Layout, SharedMemory
from tinyvllm.distributed.ranks import BEAT_SECONDS
from tinyvllm.runner.device import start_device

PR_SET_PDEATHSIG = 1


def main(socket_fd: int, memory_fd: int) -> None:
    end_with_parent()
    link = socket.socket(fileno=socket_fd)
    start = json.loads(link.makefile("rb").readline())
    memory = SharedMemory(Layout(**start["layout"]), memory_fd)
    memory.close_file()
    config = EngineConfig(**start["config"]).of_rank(start["rank"])
    start_device(config.device, cache_folder())
    from tinyvllm.runner.opened import open_model
    from tinyvllm.runner.pipeline import RankStart
    from tinyvllm.runner.runner import Runner

    opened = open_model(config, config.device, RankStart(memory, start["rank"], start["stage_ends"]))
    runner, links = Runner(config, config.device, opened=opened), {name: socket.socket(fileno=fd) for name, fd in start["links"].items()}
    link.sendall(b"+")
    threading.Thread(target=send_heartbeats, args=(link,), name="tinyvllm-heartbeat", daemon=True).start()
    run(runner, memory, start["rank"], links.get("receives", link).makefile("rb"), links.get("sends"))
    if "receives" in links:
        link.recv(1)  # rank 0 ends this process, and must not take it for the one that was the first to end


def run(runner: Any, memory: SharedMemory, rank: int, messages: IO[bytes], sends: socket.socket | None) -> None:
    """Run what is announced until that link is closed; pass it on to the next stage."""
    from tinyvllm.runner.prepare import Shape
    from tinyvllm.runner.ranked import pass_stream, take_inputs

    for line in messages:
        message = json.loads(line)
        if message["do"] == "copy":
            runner.pool.copy([tuple(pair) for pair in message["pairs"]])
        else:
            plan = runner.plan_of(Shape(*message["shape"]), message["all_rows"])
            take_inputs(plan.inputs, memory, rank, message)
            stream, *_ = plan.forward(**message["values"])
            if sends is not None:
                pass_stream(stream, memory, rank, message)
        if sends is not None:
            sends.sendall(line)


def send_heartbeats(link: socket.socket) -> None:
    """Tell rank 0 that this process is not stopped, until rank 0 ends."""
    with contextlib.suppress(OSError):
        while True:
            time.sleep(BEAT_SECONDS)
            link.sendall(b".")


def end_with_parent() -> None:
    """End when rank 0 ends, however it does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:
            os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
