"""Resolves what the user typed to a path: a file, a folder, or the name of a model on a hub.

A hub name goes through the package huggingface_hub, an extra, with its local cache, HF_ENDPOINT, HF_HUB_OFFLINE and tokens.
Only usable files are fetched. Their content is not read here.
"""

from __future__ import annotations

import os
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tinyvllm.errors import ArgumentError, ModelError
from tinyvllm.weights.gguf import split_parts

_SPEAKER = "hub"
PATTERNS = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja"]
# Copies in subfolders (original/, onnx/) and in Mistral's own layout would double the download.
IGNORED = ["*/*", "consolidated*.safetensors"]
_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?)(:(?P<choice>[\w./+-]+))?")


def resolve_model(name_or_path: str, revision: str | None = None) -> Path:
    """The path of a model: an existing path as it is; else "org/name", "org/name:file.gguf" or "org/name:Q4_K_M" from the hub.

    `revision` is a branch, tag or commit of the hub's repository. Any failure is a ModelError of one line; a revision of a
    path is an ArgumentError.
    """
    path = Path(os.path.expanduser(name_or_path))  # without an error where there is no home
    if name_or_path and _exists(path):  # Path("") would be the current folder
        if revision is not None:
            raise ArgumentError(f"{_SPEAKER}: revision {revision!r} needs the name of a model on a hub, and {path} is a path here")
        return path
    parsed = parse_name(name_or_path)
    if parsed is None:
        raise ModelError(f"{_SPEAKER}: no such file or folder: {name_or_path[:200]!r}")
    repo, choice = parsed
    if choice is None:
        return _safetensors_snapshot(repo, revision)
    patterns = gguf_patterns(choice)
    return _pick_gguf(_download(repo, revision, patterns, ["*mmproj*"]), repo, choice, patterns)


def parse_name(name: str) -> tuple[str, str | None] | None:
    """The repository and the choice of a hub's name, None for a text that cannot be one."""
    match = _NAME.fullmatch(name)
    return None if match is None or _looks_like_a_path(name) else (match["repo"], match["choice"])


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long for the file system, or with a zero byte
        return False


def _looks_like_a_path(text: str) -> bool:
    return text.startswith((".", "/", "~")) or (":" not in text and text.lower().endswith((".gguf", ".safetensors", ".json", "/")))


def _safetensors_snapshot(repo: str, revision: str | None) -> Path:
    folder = _download(repo, revision, PATTERNS, IGNORED)
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{_SPEAKER}: {repo} has no safetensors; if it has GGUF files, choose one by file name or quantization, such as {repo}:Q4_K_M"
        )
    return folder


def gguf_patterns(choice: str) -> list[str]:
    """A file name, with the other parts of a split model, or a quantization's name at its end, in upper or lower case."""
    if choice.lower().endswith(".gguf"):
        split = re.fullmatch(r"(.+)-\d{5}-of-(\d{5})\.gguf", choice)
        return [f"{split[1]}-*-of-{split[2]}.gguf"] if split else [choice]
    spellings = dict.fromkeys((choice, choice.lower(), choice.upper()))
    return [f"*[-._]{s}{end}" for s in spellings for end in (".gguf", "-*-of-*.gguf")]


def _pick_gguf(folder: Path, repo: str, choice: str, patterns: list[str]) -> Path:
    files = sorted(p for p in folder.rglob("*.gguf") if any(fnmatchcase(str(p.relative_to(folder)), q) for q in patterns))
    models = sorted({split_parts(p)[0] for p in files if "mmproj" not in p.name})
    if not models:
        raise ModelError(f"{_SPEAKER}: {repo} has no GGUF file {choice!r}; look at the repository's file list for the right name")
    if len(models) > 1:
        names = ", ".join(p.name for p in models)
        raise ModelError(f"{_SPEAKER}: {choice!r} matches several files of {repo}; name one of them: {names}")
    return models[0]


def _download(repo: str, revision: str | None, patterns: list[str], ignored: list[str]) -> Path:
    """The folder in the hub's cache with the files that match `patterns`; missing ones are downloaded."""
    package = hub_package(repo)
    try:
        folder = package.snapshot_download(repo, revision=revision, allow_patterns=patterns, ignore_patterns=ignored)
    except Exception as error:  # the package raises its HTTP client's errors, OSError and ValueError as well as its own
        raise ModelError(f"{_SPEAKER}: {explain(error, repo, revision)}") from error
    return Path(folder)


def hub_package(repo: str) -> Any:
    """The package huggingface_hub; ModelError where it is missing."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise ModelError(
            f"{_SPEAKER}: {repo!r} is no file or folder here, and hub names need the package huggingface_hub (pip install huggingface_hub)"
        ) from error
    return huggingface_hub


def explain(error: Exception, repo: str, revision: str | None) -> str:
    """A failed request to a hub, in a line that says what to try."""
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    if isinstance(error, errors.GatedRepoError):
        return f"{repo} is gated: request access on {hub}/{repo}, then set HF_TOKEN or log in with `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{repo!r} is neither a file or folder here nor a public model on {hub}; for a private one set HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo} on {hub} has no revision {revision!r}"
    if isinstance(error, errors.HFValidationError):
        return f"{repo!r} is neither a file or folder here nor a possible name of a model on a hub (org/name)"
    if constants.HF_HUB_OFFLINE:
        return f"{repo} is not completely in the local cache and HF_HUB_OFFLINE is set; unset it, or give a folder"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return (
            f"{repo} is not completely in the local cache and {hub} cannot be reached; check the network or HF_ENDPOINT, or give a folder"
        )
    return f"{repo} could not be fetched from {hub}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
