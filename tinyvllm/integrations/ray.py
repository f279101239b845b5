"""Ray Serve: replicas of one server, OpenAI routes in front of them, requests routed by prefix. `serve run` takes `app` (docs/scale.md).

Two deployments. `Replica` has an engine and the server's own ASGI application, unchanged. `Ingress` reads a request, hashes its prompt, and
forwards it to the replica that PrefixRouter chooses; it streams back the messages of the application.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

try:
    from ray import serve
    from ray.exceptions import RayActorError, RayError
    from ray.serve.config import RequestRouterConfig
    from ray.serve.exceptions import RayServeException
    from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
except ImportError as error:
    raise ImportError(f"tinyvllm.integrations.ray needs the packages of the extra 'ray': pip install 'tinyvllm[ray]' ({error})") from error

from tinyvllm.distributed.prefix_map import PrefixMap
from tinyvllm.errors import ArgumentError, nearest
from tinyvllm.integrations.prompt_hashes import prompt_hashes
from tinyvllm.server.core.config import ServerConfig
from tinyvllm.server.core.keys import read_keys
from tinyvllm.server.core.limits import MAX_BODY
from tinyvllm.server.core.models import Models
from tinyvllm.server.http.app import create_app

OPTIONS: dict[str, Any] = {
    "model": None,  # folder, GGUF file or hub name; None is the bundled model
    "served_model_name": "tinyvllm",
    "engine": {},  # options of AsyncLLM
    "server": {},  # fields of ServerConfig
    "api_key_file": None,
    "routing": "prefix",
    "num_replicas": 1,
    "autoscaling": None,  # Ray's autoscaling_config, in place of num_replicas
    "max_ongoing_requests": 256,  # of one replica; its engine queues and batches them
    "num_ingress": 1,
    "replica_options": {},  # Ray's ray_actor_options, such as {"num_gpus": 1}
    "ingress_options": {"num_cpus": 0},
}
MAX_TRIES = 3  # of a request whose replica died before it answered anything
_SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers", "client", "server")
_HTTP_START, _HTTP_BODY = "http.response.start", "http.response.body"
log = logging.getLogger("tinyvllm")


class PrefixRouter(RequestRouter):
    """Ray's request router: the replica that has computed the longest beginning of a prompt; its hashes are the second argument."""

    def initialize_state(self, **options: Any) -> None:
        self._map = PrefixMap(**options)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # if all are full
        replicas = {str(replica.replica_id): replica for replica in candidate_replicas}
        loads = {name: self.replica_queue_len_cache.get(replica.replica_id) or 0 for name, replica in replicas.items()}
        return [[replicas[name]] for name in self._map.rank(_hashes_of(pending_request), loads)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._map.routed(_hashes_of(pending_request), str(replica_id))

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._map.keep({str(replica.replica_id) for replica in replicas})


class RoundRobinRouter(RequestRouter):
    """One replica after another, to compare with."""

    def initialize_state(self, **options: Any) -> None:
        self._turn = 0

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        replicas = sorted(candidate_replicas, key=lambda replica: str(replica.replica_id))
        self._turn += 1
        return [[replicas[(self._turn + i) % len(replicas)]] for i in range(len(replicas))]


ROUTERS = {
    "prefix": "tinyvllm.integrations.ray:PrefixRouter",
    "round_robin": "tinyvllm.integrations.ray:RoundRobinRouter",
    "power_of_two": None,  # Ray's own
}


def _hashes_of(request: PendingRequest | None) -> list[bytes]:
    hashes = request.args[1] if request is not None and len(request.args) > 1 else []
    return hashes if isinstance(hashes, list) else []


class Replica:
    """One engine and the server's application. Ray ends it by `__del__`, after its requests."""

    async def __init__(self, options: Mapping[str, Any]) -> None:  # type: ignore[misc]  # Ray awaits it
        model = {} if options["model"] is None else {"model": options["model"]}
        config = ServerConfig(**{"access_log": False} | options["server"])
        models = Models({options["served_model_name"]: {"warm_up": True, **model, **options["engine"]}}, None, {})
        self._app, self._service = create_app(config, models, read_keys([], options["api_key_file"]))
        await models.start()

    async def respond(self, scope: dict[str, Any], hashes: list[bytes], body: bytes) -> AsyncIterator[list[dict[str, Any]]]:
        """The ASGI messages of the answer, as they come. A generator that is closed early is a client that has gone."""
        messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        bodies, gone = [body], asyncio.Event()

        async def receive() -> dict[str, Any]:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            messages.put_nowait(dict(message))

        task = asyncio.ensure_future(self._app({**scope, "asgi": {"version": "3.0"}, "root_path": ""}, receive, send))
        task.add_done_callback(lambda done: messages.put_nowait(None))
        try:
            ended = False
            while not ended:
                batch = [await messages.get()]
                while not messages.empty():
                    batch.append(messages.get_nowait())
                ended = None in batch
                if sent := [message for message in batch if message is not None]:
                    yield sent
            await task
        finally:
            gone.set()
            if not task.done():
                task.cancel()

    async def check_health(self) -> None:
        for name, llm in self._service.models.loaded().items():
            if not llm.alive:
                raise RuntimeError(f"the engine of model {name} has stopped")

    async def __del__(self) -> None:
        if hasattr(self, "_service"):
            await self._service.drain()
            await self._service.models.close()


class _Forwarder:
    """The ASGI application of the ingress."""

    def __init__(self, handle: Any, max_body: int) -> None:
        self._respond = handle.options(stream=True).respond
        self._max_body = max_body

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for kind in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{kind}.complete"})
        elif scope["type"] == "http":
            body = await self._read(receive)
            if body is None:
                await _send_error(send, 413, f"the body is longer than {self._max_body} bytes", "body_too_large")
            else:
                await self._forward(scope, body, receive, send)

    async def _read(self, receive: Any) -> bytes | None:
        """The body of a request; None if it is too long."""
        pieces: list[bytes] = []
        size, more = 0, True
        while more:
            message = await receive()
            piece, more = message.get("body", b""), message.get("more_body", False)
            size += len(piece)
            if size > self._max_body:
                return None
            pieces.append(piece)
        return b"".join(pieces)

    async def _forward(self, scope: Any, body: bytes, receive: Any, send: Any) -> None:
        headers = dict(scope["headers"])
        owner = headers.get(b"authorization") or headers.get(b"x-api-key") or b""
        request = {name: scope[name] for name in _SCOPE if name in scope}  # a client must not reach what else a scope may hold
        hashes = prompt_hashes(body, owner) if scope["method"] == "POST" else []
        answer = _Answer(send)
        forwarding = asyncio.ensure_future(self._relay(request, hashes, body, answer))
        leaving = asyncio.ensure_future(_wait_for_disconnect(receive))
        try:
            await asyncio.wait((forwarding, leaving), return_when=asyncio.FIRST_COMPLETED)
            if forwarding.done():
                forwarding.result()
        finally:
            for task in (forwarding, leaving):
                task.cancel()
            await asyncio.gather(forwarding, leaving, return_exceptions=True)

    async def _relay(self, request: dict[str, Any], hashes: list[bytes], body: bytes, answer: _Answer) -> None:
        for attempt in range(1, MAX_TRIES + 1):
            stream = self._respond.remote(request, hashes, body)
            try:
                async for messages in stream:
                    for message in messages:
                        await answer.pass_on(message)
                return
            except asyncio.CancelledError:
                stream.cancel()
                raise
            except (RayError, RayServeException) as error:
                log.warning("ray: a replica failed during %s (attempt %d): %s", request["path"], attempt, type(error).__name__)
                if answer.started or not isinstance(error, RayActorError) or attempt == MAX_TRIES:
                    await answer.fail("the replica that computed this request has ended; send the request again")
                    return


class _Answer:
    """What of an answer the client has got: an error after its beginning must look like one."""

    def __init__(self, send: Any) -> None:
        self._send = send
        self.started = False
        self._is_stream = False

    async def pass_on(self, message: dict[str, Any]) -> None:
        if message["type"] == _HTTP_START:
            self.started = True
            self._is_stream = any(n.lower() == b"content-type" and v.startswith(b"text/event-stream") for n, v in message["headers"])
        await self._send(message)

    async def fail(self, text: str) -> None:
        """503 before the beginning; an event with the error in a stream. Any other body is cut off, which its client notices."""
        if not self.started:
            await _send_error(self._send, 503, text, "replica_died", [(b"retry-after", b"1")])
        elif self._is_stream:
            event = f"data: {json.dumps(_error(text, 'replica_died'))}\n\n"
            await self._send({"type": _HTTP_BODY, "body": event.encode(), "more_body": False})
        else:
            raise RuntimeError(text)


def _error(text: str, code: str) -> dict[str, Any]:
    return {"error": {"message": text, "type": "server_error", "param": None, "code": code}}


async def _send_error(send: Any, status: int, text: str, code: str, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    body = json.dumps(_error(text, code)).encode()
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *(headers or [])]
    await send({"type": _HTTP_START, "status": status, "headers": head})
    await send({"type": _HTTP_BODY, "body": body, "more_body": False})


async def _wait_for_disconnect(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@serve.ingress()
class Ingress:
    """Accepts HTTP for all replicas."""

    def __init__(self, replicas: Any, max_body: int) -> None:
        self._handle, self._max_body = replicas, max_body

    def __serve_build_asgi_app__(self) -> _Forwarder:
        return _Forwarder(self._handle, self._max_body)


def app(args: Mapping[str, Any]) -> Any:
    """The application for `serve run tinyvllm.integrations.ray:app` and for `args` of its YAML. ArgumentError for an unknown option."""
    unknown = [name for name in args if name not in OPTIONS]
    if unknown:
        raise ArgumentError(f"ray: unknown option {unknown[0]!r}{nearest(unknown[0], OPTIONS)}; known are {', '.join(OPTIONS)}")
    options = {**OPTIONS, **args}
    if options["routing"] not in ROUTERS:
        raise ArgumentError(f"ray: routing must be one of {', '.join(ROUTERS)}, got {options['routing']!r:.60}")
    if options["autoscaling"] is not None and "num_replicas" in args:
        raise ArgumentError("ray: autoscaling and num_replicas both set the number of replicas: give one of them")
    config = ServerConfig(**options["server"])
    router = ROUTERS[options["routing"]]
    scaling = {"num_replicas": int(options["num_replicas"])}
    replicas = serve.deployment(Replica).options(
        name="Replica",
        ray_actor_options=options["replica_options"],
        max_ongoing_requests=int(options["max_ongoing_requests"]),
        graceful_shutdown_timeout_s=config.grace_seconds + 10,
        **(scaling if options["autoscaling"] is None else {"autoscaling_config": options["autoscaling"]}),
        **({} if router is None else {"request_router_config": RequestRouterConfig(request_router_class=router)}),
    )
    ingress = serve.deployment(Ingress).options(
        name="Ingress",
        num_replicas=int(options["num_ingress"]),
        ray_actor_options=options["ingress_options"],
        max_ongoing_requests=10_000,
        graceful_shutdown_timeout_s=config.grace_seconds + 10,
    )
    return ingress.bind(replicas.bind(options), min(config.max_body, MAX_BODY))
