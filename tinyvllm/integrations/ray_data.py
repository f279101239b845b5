"""Ray Data: prompts of JSON lines or Parquet through many engines, with resume.

Each batch of answers is one file of the output folder, written whole or not at all, so a run that was killed loses the batches that were
computing. The next run reads which keys the folder has, and computes the others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

try:
    import ray.data
except ImportError as error:
    raise ImportError(
        f"tinyvllm.integrations.ray_data needs the packages of the extra 'ray': pip install 'tinyvllm[ray]' ({error})"
    ) from error

from tinyvllm.engine.llm import LLM
from tinyvllm.errors import ArgumentError, OutputError, TinyvllmError
from tinyvllm.request import SamplingParams

READERS = {".jsonl": ray.data.read_json, ".json": ray.data.read_json, ".parquet": ray.data.read_parquet}
FIELDS = ("prompt", "messages", "prompt_token_ids")  # one of them is a row's prompt


class Generate:
    """One engine of a pool: answers batches of rows, and writes each to a file."""

    def __init__(self, output: str, key: str, model: str | None, engine: Mapping[str, Any], sampling: Mapping[str, Any]) -> None:
        self._folder, self._key = Path(output), key
        self._llm = LLM(model, **engine)
        self._params = SamplingParams(**sampling)

    def __call__(self, rows: dict[str, Any]) -> dict[str, list[str]]:
        """The keys of a batch, once its answers are in the folder. A row that cannot be served has an error in place of a text."""
        names = list(rows)
        batch = [dict(zip(names, values)) for values in zip(*(_listed(rows[name]) for name in names))]
        answers = [self._answer(row) for row in batch] if len(batch) == 1 else self._answers(batch)
        keys = [str(row[self._key]) for row in batch]
        lines = "".join(json.dumps({self._key: row[self._key], **answer}) + "\n" for row, answer in zip(batch, answers))
        _write_whole(self._folder / f"part-{blake2b(json.dumps(keys).encode(), digest_size=12).hexdigest()}.jsonl", lines)
        return {self._key: keys}

    def _answers(self, batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """All together; if one of them cannot be served, one by one, so that the others have their answers."""
        try:
            outputs = self._llm.generate([prompt_of(row) for row in batch], self._params)
        except TinyvllmError:
            return [self._answer(row) for row in batch]
        return [_result(output) for output in outputs]

    def _answer(self, row: dict[str, Any]) -> dict[str, Any]:
        try:
            return _result(self._llm.generate([prompt_of(row)], self._params)[0])
        except TinyvllmError as error:
            return {"error": str(error)}


def prompt_of(row: Mapping[str, Any]) -> Any:
    """The prompt of a row: a text under `prompt`, or `messages`, or `prompt_token_ids`. ArgumentError if it has none."""
    for name in FIELDS:
        if (value := row.get(name)) is not None:
            return value if name == "prompt" else {name: _plain(value)}
    raise ArgumentError(f"ray data: a row needs one of {', '.join(FIELDS)}, got {', '.join(map(str, row)):.200}")


def generate(
    source: str,
    output: str,
    *,
    key: str = "id",
    model: str | None = None,
    engine: Mapping[str, Any] | None = None,
    sampling: Mapping[str, Any] | None = None,
    num_engines: int = 1,
    batch_size: int = 64,
    resources: Mapping[str, Any] | None = None,
) -> int:
    """Answer the rows of `source` (.jsonl or .parquet) into the folder `output`; how many were computed, without those it had.

    key        column that names a row; each value once
    engine     options of LLM, sampling those of SamplingParams
    resources  of each engine, such as {"num_gpus": 1}

    The folder must be reached by all machines. ArgumentError for a source of another kind or without the key, or keys that repeat.
    """
    reader = READERS.get(Path(source).suffix)
    if reader is None:
        raise ArgumentError(f"ray data: source must end with one of {', '.join(READERS)}, got {source!r}")
    folder = Path(output).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    rows = reader(str(Path(source).absolute()))
    if key not in rows.columns():
        raise ArgumentError(f"ray data: {source} has no column {key!r}; it has {', '.join(rows.columns())}: give key")
    keys = [str(row[key]) for row in rows.select_columns([key]).take_all()]
    if len(set(keys)) != len(keys):
        raise ArgumentError(
            f"ray data: of {len(keys)} rows of {source} only {len(set(keys))} have a {key!r} of their own; give another key"
        )
    done = finished_keys(folder, key)
    if done.issuperset(keys):
        return 0
    given = {"output": str(folder), "key": key, "model": model, "engine": dict(engine or {}), "sampling": dict(sampling or {})}
    answered = rows.filter(lambda row: str(row[key]) not in done).map_batches(
        Generate, fn_constructor_kwargs=given, batch_size=batch_size, concurrency=num_engines, **(resources or {})
    )
    return len(answered.take_all())


def finished_keys(folder: Path, key: str) -> set[str]:
    """The keys of the rows that the folder has answers of. OutputError for a file that is none of ours."""
    found = set()
    for path in sorted(folder.glob("part-*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                found.add(str(json.loads(line)[key]))
            except (ValueError, LookupError, TypeError) as error:
                raise OutputError(f"ray data: {path}:{number} is no answer with the key {key!r}: take another folder") from error
    return found


def _result(output: Any) -> dict[str, Any]:
    if output.failure is not None:
        return {"error": str(output.failure)}
    first = output.outputs[0]
    counts = {"prompt_tokens": len(output.prompt_token_ids), "completion_tokens": len(first.token_ids)}
    return {"text": first.text, "finish_reason": first.finish_reason, **counts}


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _listed(column: Any) -> list[Any]:
    return list(column.tolist() if hasattr(column, "tolist") else column)


def _plain(value: Any) -> Any:
    """Lists in place of arrays, which Parquet's columns become."""
    return _listed(value) if hasattr(value, "tolist") else value
