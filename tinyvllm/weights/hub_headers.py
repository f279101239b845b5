"""The headers of a model on a hub, by range requests: files of the announced sizes, of which only the headers are there.

Readers of checkpoints open them like any others, with all their checks; tensors read from them are zeros, but for the small ones of
quantized checkpoints that say how matrices are held: these are fetched, too. Requests go through urllib, whose answers are read as far as
they are needed: huggingface_hub would take a whole file from a server that ignores ranges.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO

from tinyvllm.errors import FormatError, ModelError
from tinyvllm.foreign import MAX_JSON_BYTES, quoted
from tinyvllm.weights import gguf, safetensors
from tinyvllm.weights.hub import hub_package
from tinyvllm.weights.hub_files import HubFile, Pull
from tinyvllm.weights.quantized.kinds import READ_AT_OPENING, is_quantized

FIRST, MAX_GGUF_HEADER = 1 << 20, 256 << 20  # bytes of the first request; of the header of a GGUF file
MAX_DESCRIPTIONS = 32  # JSON files
SECONDS, TOTAL_SECONDS = 20.0, 120.0  # of silence, and of one header
MAX_NUMBERS, MAX_REQUESTS, REQUESTS_AT_ONCE = 64 << 20, 4096, 16  # of the small tensors of a quantized checkpoint
_GAP = 1 << 16  # bytes between two tensors that one request fetches with them
_SPEAKER = "hub"
_PIECE = 1 << 16
_ROPE = "rope_*.weight"  # small tensors of GGUF files that belong to the description: models/llama.py reads their numbers
_MAX_ROPE = 1 << 16  # bytes of one
_SKIPPED = ("tokenizer*.json", "vocab*.json", "special_tokens_map.json", "added_tokens.json")


@contextlib.contextmanager
def header_copies(pull: Pull) -> Iterator[Path]:
    """The path of a model that has the description and the headers of `pull`, while the context is open.

    ModelError for what cannot be fetched, and for a quantized checkpoint whose small tensors take more than MAX_REQUESTS or MAX_NUMBERS
    bytes; FormatError for a header that is damaged or beyond its limit.
    """
    with tempfile.TemporaryDirectory(prefix="tinyvllm-headers-") as name:
        folder, source = Path(name), _Source(pull)
        weights = [file for file in pull.files if file.name.lower().endswith((".gguf", ".safetensors"))]
        described = [file for file in pull.files if _describes(file.name)]
        if len(described) > MAX_DESCRIPTIONS:
            raise ModelError(f"{_SPEAKER}: {pull.repo} has {len(described)} JSON files, and at most {MAX_DESCRIPTIONS} are read")
        for file in described:
            _write(folder, file, source.start_of(file, _limited(file, MAX_JSON_BYTES)))
        quantized, small = pull.is_folder and is_quantized(folder), list[_Part]()
        for file in weights:
            if file.name.lower().endswith(".gguf"):
                _write(folder, file, _gguf_header(source, file))
                _write_rope(folder, source, file)
                continue
            header = _safetensors_header(source, file)
            _write(folder, file, header)
            small += _read_at_opening(file, header) if quantized else []
        _write_numbers(folder, source, pull, small)
        yield folder if pull.is_folder else folder / Path(weights[0].name).name


def _describes(name: str) -> bool:
    return name.endswith(".json") and "/" not in name and not any(fnmatchcase(name, pattern) for pattern in _SKIPPED)


def _limited(file: HubFile, limit: int) -> int:
    if file.nbytes > limit:
        raise FormatError(f"{_SPEAKER}: {file.name} has {file.nbytes} bytes, and at most {limit} are read")
    return file.nbytes


def _write_rope(folder: Path, source: _Source, file: HubFile) -> None:
    """The numbers of positions, into the hole."""
    path = folder / Path(file.name).name
    with open(path, "r+b") as copy:
        header = copy.read(MAX_GGUF_HEADER if file.nbytes > MAX_GGUF_HEADER else file.nbytes)
        for name, (start, nbytes) in (gguf.tensor_spans(path, header) or {}).items():
            if fnmatchcase(name, _ROPE) and nbytes <= _MAX_ROPE and start + nbytes <= file.nbytes:
                copy.seek(start)
                copy.write(source.read(file, start, nbytes))


_Part = tuple[HubFile, int, int]  # a file, the first byte, the number of bytes


def _read_at_opening(file: HubFile, header: bytes) -> list[_Part]:
    """The parts of a file with the small tensors that readers of quantized checkpoints read, neighbours together."""
    spans = safetensors.tensor_spans(Path(file.name), header)
    parts = list[_Part]()
    for start, nbytes in sorted(span for name, span in spans.items() if name.rsplit(".", 1)[-1] in READ_AT_OPENING):
        end = start + nbytes
        if end > file.nbytes:
            raise FormatError(f"{_SPEAKER}: {file.name} has {file.nbytes} bytes, and its tensors need {end}; it is truncated")
        if parts and start - sum(parts[-1][1:]) <= _GAP:
            start = parts.pop()[1]
        parts.append((file, start, end - start))
    return parts


def _write_numbers(folder: Path, source: _Source, pull: Pull, parts: list[_Part]) -> None:
    """The parts into the holes."""
    size = sum(nbytes for _, _, nbytes in parts)
    if len(parts) > MAX_REQUESTS or size > MAX_NUMBERS:
        raise ModelError(
            f"{_SPEAKER}: {pull.repo} is quantized, and what says how its matrices are held is {size} bytes in {len(parts)} places, more "
            f"than {MAX_NUMBERS} or {MAX_REQUESTS}: `tinyvllm pull {pull.name}` and plan that, or give a GGUF file of it"
        )
    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
        try:
            for (file, start, _), data in zip(parts, pool.map(lambda part: source.read(*part), parts), strict=True):
                with open(folder / Path(file.name).name, "r+b") as copy:
                    copy.seek(start)
                    copy.write(data)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _write(folder: Path, file: HubFile, data: bytes) -> None:
    """The bytes at the beginning of a file of the announced size; the rest is a hole, which takes no space."""
    try:
        with open(folder / Path(file.name).name, "wb") as copy:
            copy.write(data)
            copy.truncate(file.nbytes)
    except OSError as error:
        raise ModelError(f"{_SPEAKER}: a copy of the header of {file.name} cannot be written: {error.strerror}") from error


def _safetensors_header(source: _Source, file: HubFile) -> bytes:
    """The length and the header; less where the file is shorter than it says, as its reader reports."""
    data = source.start_of(file, min(file.nbytes, FIRST))
    length = 8 + int.from_bytes(data[:8], "little")
    if length - 8 > safetensors.MAX_HEADER:
        return data
    return data if length <= len(data) else source.start_of(file, min(file.nbytes, length), data)


def _gguf_header(source: _Source, file: HubFile) -> bytes:
    data = source.start_of(file, min(file.nbytes, FIRST))
    while gguf.tensor_spans(Path(file.name), data) is None and len(data) < file.nbytes:
        if len(data) >= MAX_GGUF_HEADER:
            raise FormatError(f"{_SPEAKER}: {file.name} has a header of more than {MAX_GGUF_HEADER} bytes; it is corrupt")
        data = source.start_of(file, min(file.nbytes, 2 * len(data)), data)
    return data


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Hubs send readers of weights to a store at another host, which must not get the user's token."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> urllib.request.Request | None:
        target = urllib.parse.urlsplit(newurl)
        if target.scheme not in ("http", "https"):
            raise urllib.error.URLError(f"a redirect to {quoted(newurl)}")
        request = super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]
        if request is not None and target.netloc != urllib.parse.urlsplit(req.full_url).netloc:
            request.remove_header("Authorization")
        return request


class _Source:
    """Reads the beginnings of a repository's files."""

    def __init__(self, pull: Pull):
        package = hub_package(pull.repo)
        self._pull, self._url = pull, package.hf_hub_url
        self._headers = {name: str(value) for name, value in package.utils.build_hf_headers().items()}
        self._opener = urllib.request.build_opener(_Redirects)

    def start_of(self, file: HubFile, count: int, known: bytes = b"") -> bytes:
        """The first `count` bytes of a file, of which `known` are known; errors of `read`."""
        return known if count <= len(known) else known + self.read(file, len(known), count - len(known))

    def read(self, file: HubFile, start: int, count: int) -> bytes:
        """`count` bytes from `start` on. ModelError where the hub does not give them."""
        url = self._url(self._pull.repo, file.name, revision=self._pull.commit)
        span = {"Range": f"bytes={start}-{start + count - 1}", "Accept-Encoding": "identity"}
        try:
            with self._opener.open(urllib.request.Request(url, headers=self._headers | span), timeout=SECONDS) as answer:
                if start and answer.status != 206:
                    raise OSError("it answers without ranges")
                data = _read(answer, count)
        except (OSError, ValueError) as error:  # URLError and HTTPError, a time-out, a damaged answer
            raise ModelError(
                f"{_SPEAKER}: the header of {self._pull.repo}: {file.name} cannot be read: {error}; try again, or `tinyvllm pull "
                f"{self._pull.name}` and plan that"
            ) from error
        if len(data) != count:
            raise ModelError(f"{_SPEAKER}: {self._pull.repo}: {file.name} ended after {len(data)} of {count} bytes; try again")
        return data


def _read(answer: IO[bytes], count: int) -> bytes:
    """`count` bytes, less if the answer ends."""
    data, end = bytearray(), time.monotonic() + TOTAL_SECONDS
    while len(data) < count and (piece := answer.read1(min(_PIECE, count - len(data)))):  # type: ignore[attr-defined]
        data += piece
        if time.monotonic() > end:
            raise TimeoutError(f"{len(data)} of {count} bytes came in {TOTAL_SECONDS:g} seconds")
    return bytes(data)
