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
from collections import deque
from collections.abc import Iterator
from typing import IO, Any

from tinyvllm.config.engine import EngineConfig
from tinyvllm.config.switches import cache_folder
from tinyvllm.config.values import expand_home
from tinyvllm.distributed.memory import Layout, SharedMemory
from tinyvllm.distributed.ranks import BEAT_SECONDS, DONE, REFUSED
from tinyvllm.errors import FormatError, ModelError
from tinyvllm.runner.device import share_cores, start_device
from tinyvllm.speculative import SpeculativeConfig

PR_SET_PDEATHSIG = 1


def main(socket_fd: int, memory_fd: int) -> None:
    end_with_parent()
    link = socket.socket(fileno=socket_fd)
    start = json.loads(link.makefile("rb").readline())
    memory = SharedMemory(Layout(**start["layout"]), memory_fd)
    memory.close_file()
    options, drafts = start["config"], start["config"]["speculative_config"]
    whole = EngineConfig(**options | {"speculative_config": drafts and SpeculativeConfig(**drafts)})
    config = whole.of_rank(start["rank"])
    start_device(config.device, cache_folder())
    from tinyvllm.runner.grid import core_share
    from tinyvllm.runner.opened import open_model
    from tinyvllm.runner.pipeline import RankStart
    from tinyvllm.runner.runner import Runner

    share_cores(core_share(whole, start["rank"]))
    opened = open_model(config, config.device, RankStart(memory, start["rank"], start["stage_ends"]))
    runner, links = Runner(config, config.device, opened=opened), {name: socket.socket(fileno=fd) for name, fd in start["links"].items()}
    link.sendall(b"+")
    threading.Thread(target=send_heartbeats, args=(link,), name="tinyvllm-heartbeat", daemon=True).start()
    run(runner, memory, start["rank"], announced(runner, link, links), links.get("sends"), link)
    if "receives" in links:
        link.recv(1)  # rank 0 ends this process, and must not take it for the one that was the first to end


def announced(runner: Any, link: socket.socket, links: dict[str, socket.socket]) -> Iterator[dict[str, Any]]:
    """What this rank does, in that order, until the link that says so is closed: of the first stage what rank 0 sends, of any other what
    the stage before passes on, and of the last one that in the order of rank 0.
    """
    if "receives" not in links:
        return map(json.loads, link.makefile("rb"))
    before = links["receives"].makefile("rb")
    return map(json.loads, before) if "sends" in links else steps_in_order(runner, link, before)


def steps_in_order(runner: Any, link: socket.socket, before: IO[bytes]) -> Iterator[dict[str, Any]]:
    """The steps that the last of several stages runs, in the order of rank 0. An adapter is read when rank 0 asks for it, and placed when
    the stages before have passed it on: steps in flight have the one before.
    """
    from tinyvllm.runner.passed import PassedMessages, copy_blocks

    placing = deque[Any]()

    def do(message: dict[str, Any]) -> None:
        if message["do"] == "copy":
            copy_blocks(runner.pool, message)
        elif (adapter := placing.popleft()) is not None:
            runner.adapters.place(message["number"], adapter)

    passed = PassedMessages(lambda: received(before), do)
    with contextlib.suppress(EOFError):
        for order in map(json.loads, link.makefile("rb")):
            if order["do"] == "adapter":
                placing.append(read_for(runner, order, link))
            else:
                yield passed.take(order["number"], order["aside"])


def received(link: IO[bytes]) -> dict[str, Any]:
    """The next message; EOFError after the last one."""
    if not (line := link.readline()):
        raise EOFError
    message: dict[str, Any] = json.loads(line)
    return message


def run(
    runner: Any, memory: SharedMemory, rank: int, messages: Iterator[dict[str, Any]], sends: socket.socket | None, link: socket.socket
) -> None:
    """Run what is announced; pass it on to the next stage. `link` is that to rank 0, for answers."""
    from tinyvllm.runner.passed import copy_blocks
    from tinyvllm.runner.prepare import Shape
    from tinyvllm.runner.ranked import pass_stream, take_inputs

    for message in messages:
        if message["do"] == "copy":
            copy_blocks(runner.pool, message)
        elif message["do"] == "adapter":
            if (adapter := read_for(runner, message, link)) is not None:
                runner.adapters.place(message["number"], adapter)
        else:
            plan = runner.plan_of(Shape(*message["shape"]), message["all_rows"])
            take_inputs(plan.inputs, memory, rank, message)
            stream, *_ = plan.forward(**message["values"])
            if sends is not None:
                pass_stream(stream, memory, rank, message)
        if sends is not None:
            sends.sendall(json.dumps(message).encode() + b"\n")


def read_for(runner: Any, message: dict[str, Any], link: socket.socket) -> Any:
    """This rank's part of an adapter, None if the files are not those that rank 0 has read; rank 0 is told which."""
    from tinyvllm.weights.peft import read_adapter

    adapter = None
    with contextlib.suppress(FormatError, ModelError, OSError):
        adapter = runner.adapters.prepare(read_adapter(expand_home("lora_path", message["path"])))
    same = adapter is not None and adapter.digest == message["digest"]
    link.sendall(DONE if same else REFUSED)
    return adapter if same else None


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
