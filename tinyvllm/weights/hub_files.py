"""The files of a model on a hub: which there are, which of them fit, fetching them whole, and what the local cache holds.

Through the package huggingface_hub, an extra: its cache, HF_ENDPOINT, HF_TOKEN, its progress bars; an interrupted download continues where
it ended. What this adds: the choice of one GGUF model among many, and a check that the bytes of a file are those that the hub announces, by
size and by SHA-256 where the hub has one (files in LFS or Xet: all weights).
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tinyvllm.errors import ArgumentError, ModelError
from tinyvllm.foreign import MAX_TENSORS, quoted
from tinyvllm.weights.hub import IGNORED, PATTERNS, explain, gguf_patterns, hub_package, parse_name

_SPEAKER = "hub"
_PIECE = 1 << 20
_SPLIT = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)", re.IGNORECASE)
_FLOATS = re.compile(r"(?:^|[-._/])(?:bf16|f16|fp16|f32|fp32)(?=[-._/])", re.IGNORECASE)


@dataclass(frozen=True)
class HubFile:
    """One file of a repository. `sha256` is None for small files, which the hub keeps in git."""

    name: str
    nbytes: int
    sha256: str | None


@dataclass(frozen=True)
class Pull:
    """The files of one model: all of a folder with safetensors, or the parts of one GGUF model. `name` is what `--model` takes."""

    repo: str
    commit: str
    name: str
    files: tuple[HubFile, ...]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


@dataclass(frozen=True)
class Held:
    """A repository in the local cache: its name, bytes on disk, and the models in it as `--model` takes them."""

    repo: str
    nbytes: int
    models: tuple[str, ...]


def plan_pull(name: str, revision: str | None, room: int) -> Pull:
    """What to fetch for "org/name", "org/name:Q4_K_M" or "org/name:file.gguf".

    Without a choice: the safetensors; of a repository with GGUF files alone the largest model of at most `room` bytes, one in 16 or 32 bits
    only where there is no other. ModelError if there is none, ArgumentError if `name` cannot be a hub's.
    """
    parsed = parse_name(name)
    if parsed is None:
        raise ArgumentError(f"{_SPEAKER}: expected the name of a model on a hub, such as org/name or org/name:Q4_K_M, got {quoted(name)}")
    repo, choice = parsed
    commit, files = _listed(repo, revision)
    folder = [file for file in files if _in_folder(file.name)]
    if choice is None and any(file.name.endswith(".safetensors") for file in folder):
        return Pull(repo, commit, repo, tuple(folder))
    models = gguf_models(files, gguf_patterns(choice) if choice is not None else ("*.gguf", "*.GGUF"))
    if choice is None:
        return _pull_of(repo, commit, _largest(models, repo, room))
    if len(models) != 1:
        found = f"matches several models: {', '.join([*models][:6])}" if models else "matches no GGUF file"
        raise ModelError(f"{_SPEAKER}: {repo}:{choice} {found}; {_there(repo, files)}")
    return _pull_of(repo, commit, *models.items())


def gguf_models(files: Iterable[HubFile], patterns: Sequence[str]) -> dict[str, tuple[HubFile, ...]]:
    """The GGUF models whose files match: their first file's name, and all parts. Projectors of images are none."""
    parts: dict[str, list[HubFile]] = {}
    for file in sorted(files, key=lambda file: file.name):
        if any(fnmatchcase(file.name, pattern) for pattern in patterns) and "mmproj" not in file.name.lower():
            parts.setdefault(_SPLIT.sub("", file.name), []).append(file)
    return {group[0].name: tuple(group) for group in parts.values()}


def fetch(pull: Pull) -> Path:
    """Download what the cache lacks and check every file; returns the folder, or the first GGUF file.

    huggingface_hub tries a broken connection again, from where it broke. ModelError for a file whose bytes are not those announced: it
    is removed.
    """
    paths = [_fetched(pull, file) for file in pull.files]
    if ":" in pull.name:
        return paths[0]
    return next(path.parent for path, file in zip(paths, pull.files, strict=True) if "/" not in file.name)


def held_models() -> list[Held]:
    """The repositories with models in the local cache, the largest first."""
    found = []
    for repo in _cache().repos:
        files = {(file.file_name, file.file_path) for revision in repo.revisions for file in revision.files}
        names = sorted({_SPLIT.sub("-00001-of-*", name) for name, _ in files})
        models = [f"{repo.repo_id}:{name}" for name in names if name.lower().endswith(".gguf") and "mmproj" not in name]
        models += [repo.repo_id] * any(name.endswith(".safetensors") for name in names)
        if repo.repo_type == "model" and models:
            found.append(Held(repo.repo_id, repo.size_on_disk, tuple(models)))
    return sorted(found, key=lambda held: -held.nbytes)


def remove(repo: str) -> int:
    """Delete a repository from the local cache; returns the bytes freed. ModelError if it is not there."""
    found = next((held for held in _cache().repos if held.repo_type == "model" and held.repo_id == repo), None)
    if found is None:
        names = ", ".join(held.repo for held in held_models()[:6]) or "nothing"
        raise ModelError(f"{_SPEAKER}: {quoted(repo)} is not in the local cache, which has {names}")
    freed = int(found.size_on_disk)
    shutil.rmtree(found.repo_path)
    return freed


def _listed(repo: str, revision: str | None) -> tuple[str, list[HubFile]]:
    """The commit of a revision, and its files."""
    package = hub_package(repo)
    try:
        info = package.HfApi().model_info(repo, revision=revision, files_metadata=True)
        files = [_file(sibling) for sibling in (info.siblings or [])[:MAX_TENSORS]]
    except Exception as error:  # as in hub.py: the errors of an HTTP client, OSError, ValueError
        raise ModelError(f"{_SPEAKER}: {explain(error, repo, revision)}") from error
    return str(info.sha), files


def _file(sibling: Any) -> HubFile:
    """ValueError for a name that would leave the folder, or a file without a size."""
    name, size = str(sibling.rfilename), sibling.size
    if name.startswith("/") or ".." in name.split("/") or not isinstance(size, int) or size < 0:
        raise ValueError(f"the hub's list of files has {quoted(name)} of size {quoted(size)}")
    sha256 = getattr(sibling.lfs, "sha256", None)
    return HubFile(name, size, str(sha256) if sha256 else None)


def _in_folder(name: str) -> bool:
    """Whether a file belongs to a model folder."""
    return any(fnmatchcase(name, p) for p in PATTERNS) and not any(fnmatchcase(name, p) for p in IGNORED)


def _largest(models: dict[str, tuple[HubFile, ...]], repo: str, room: int) -> tuple[str, tuple[HubFile, ...]]:
    packed = {name: parts for name, parts in models.items() if not _FLOATS.search(name)} or models
    if not packed:
        raise ModelError(f"{_SPEAKER}: {repo} has neither safetensors nor GGUF files")
    sizes = {name: sum(part.nbytes for part in parts) for name, parts in packed.items()}
    fitting = [name for name in packed if sizes[name] <= room]
    if not fitting:
        least = min(sizes, key=lambda name: sizes[name])
        raise ModelError(
            f"{_SPEAKER}: no GGUF model of {repo} fits: the smallest, {least}, has {sizes[least] / 1e9:.1f} GB, and there is room for "
            f"{room / 1e9:.1f} GB; choose one by name ({repo}:{least}) if memory will be free, or give --memory"
        )
    best = max(fitting, key=lambda name: sizes[name])
    return best, packed[best]


def _pull_of(repo: str, commit: str, model: tuple[str, tuple[HubFile, ...]]) -> Pull:
    name, parts = model
    return Pull(repo, commit, f"{repo}:{name}", parts)


def _there(repo: str, files: Sequence[HubFile]) -> str:
    names = [*gguf_models(files, ("*.gguf",))]
    return f"{repo} has {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}" if names else f"{repo} has no GGUF file"


def _fetched(pull: Pull, file: HubFile) -> Path:
    path = _downloaded(pull, file)
    found = path.stat().st_size
    wrong = f"{found} bytes instead of {file.nbytes}" if found != file.nbytes else _wrong_hash(path, file)
    if wrong is None:
        return path
    path.resolve().unlink(missing_ok=True)  # the link in the snapshot points to the bytes
    path.unlink(missing_ok=True)
    raise ModelError(f"{_SPEAKER}: {pull.repo}: {file.name} has {wrong}, and was removed; pull it again")


def _wrong_hash(path: Path, file: HubFile) -> str | None:
    if file.sha256 is None:
        return None
    digest = hashlib.sha256()
    with path.open("rb") as data:
        while piece := data.read(_PIECE):
            digest.update(piece)
    return None if digest.hexdigest() == file.sha256 else f"the SHA-256 {digest.hexdigest()[:12]}... instead of {file.sha256[:12]}..."


def _downloaded(pull: Pull, file: HubFile) -> Path:
    package = hub_package(pull.repo)
    try:
        return Path(package.hf_hub_download(pull.repo, file.name, revision=pull.commit))
    except Exception as error:
        raise ModelError(f"{_SPEAKER}: {explain(error, pull.repo, pull.commit)}") from error


def _cache() -> Any:
    package = hub_package("the list of models")
    try:
        return package.scan_cache_dir()
    except package.CacheNotFound:
        return SimpleNamespace(repos=())
