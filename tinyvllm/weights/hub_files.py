"""The files of a model on a hub: which there are, fetching them whole, and what the local cache holds.

Through the package huggingface_hub, an extra: its cache, HF_ENDPOINT, HF_TOKEN, its progress bars; an interrupted download continues where
it ended. What this adds: the models among the files, and a check that the bytes of a file are those that the hub announces, by
size and by SHA-256 where the hub has one (files in LFS or Xet: all weights).
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tinyvllm.errors import ArgumentError, ModelError
from tinyvllm.foreign import MAX_TENSORS, quoted
from tinyvllm.lazy_dataclass import dataclass
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

    @property
    def is_folder(self) -> bool:
        return ":" not in self.name

    @property
    def is_float(self) -> bool:
        """Whether the name of a GGUF model says 16 or 32 bits."""
        return _FLOATS.search(self.files[0].name) is not None


@dataclass(frozen=True)
class Held:
    """A repository in the local cache: its name, bytes on disk, and the models in it as `--model` takes them."""

    repo: str
    nbytes: int
    models: tuple[str, ...]


def hub_models(name: str, revision: str | None) -> list[Pull]:
    """What may be fetched for "org/name", "org/name:Q4_K_M" or "org/name:file.gguf", one model where there is a choice.

    The folder with safetensors comes first, then the GGUF models, the largest first; those in 16 or 32 bits only where there are no others.

    ModelError if there is none, ArgumentError if `name` cannot be a hub's.
    """
    parsed = parse_name(name)
    if parsed is None:
        raise ArgumentError(f"{_SPEAKER}: expected the name of a model on a hub, such as org/name or org/name:Q4_K_M, got {quoted(name)}")
    repo, choice = parsed
    commit, files = _listed(repo, revision)
    models = gguf_models(files, gguf_patterns(choice) if choice is not None else ("*.gguf", "*.GGUF"))
    if choice is not None and len(models) != 1:
        found = f"matches several models: {', '.join([*models][:6])}" if models else "matches no GGUF file"
        raise ModelError(f"{_SPEAKER}: {repo}:{choice} {found}; {_there(repo, files)}")
    packed = {name: parts for name, parts in models.items() if not _FLOATS.search(name)} or models
    pulls = sorted((Pull(repo, commit, f"{repo}:{name}", parts) for name, parts in packed.items()), key=lambda pull: -pull.nbytes)
    folder = tuple(file for file in files if _in_folder(file.name))
    if choice is None and any(file.name.endswith(".safetensors") for file in folder):
        pulls.insert(0, Pull(repo, commit, repo, folder))
    if not pulls:
        raise ModelError(f"{_SPEAKER}: {repo} has neither safetensors nor GGUF files")
    return pulls


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
    if not pull.is_folder:
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
