"""A stand-in for the Hugging Face hub: repositories as folders, and downloads into a cache of the real layout."""

from __future__ import annotations

import os
import shutil
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants


class FakeHub:
    """Repositories by id and revision, which ``huggingface_hub.snapshot_download`` serves.

    Attributes:
        cache: the local cache that the library looks into; downloads: (repository, files) of each call, in order.
    """

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch):
        self.cache, self.downloads = root / "hub", []
        self._folders: dict[str, dict[str, Path]] = {}  # by commit
        self._revisions: dict[str, dict[str, str]] = {}  # commit of each name
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(self.cache))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot_download)

    def publish(self, repo_id: str, folder: Path, commit: str, revision: str = "main") -> None:
        """Puts the files of ``folder`` on the hub; ``revision`` is then this commit."""
        self._folders.setdefault(repo_id, {})[commit] = folder
        self._revisions.setdefault(repo_id, {})[revision] = commit

    def snapshot_download(self, repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        if repo_id not in self._folders:
            raise RuntimeError(f"404 Client Error.\nRepository Not Found for url: {repo_id}.")
        name = revision or "main"
        commit = self._revisions[repo_id].get(name, name)
        source = self._folders[repo_id][commit]
        files = [file for file in sorted(os.listdir(source)) if any(fnmatch(file, p) for p in allow_patterns)]
        self.downloads.append((repo_id, files))
        for file in files:
            self.store(repo_id, source / file, commit)
        if revision != commit:
            reference = self._folder(repo_id) / "refs" / name
            reference.parent.mkdir(parents=True, exist_ok=True)
            reference.write_text(commit)
        return str(self._folder(repo_id) / "snapshots" / commit)

    def store(self, repo_id: str, file: Path, commit: str) -> None:
        """One file of the local copy: a link to a blob, as the library keeps it."""
        blob = self._folder(repo_id) / "blobs" / f"{commit}-{file.name}"
        link = self._folder(repo_id) / "snapshots" / commit / file.name
        for place in (blob, link):
            place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, blob)
        if not link.exists():
            link.symlink_to(os.path.relpath(blob, link.parent))

    def _folder(self, repo_id: str) -> Path:
        return self.cache / f"models--{repo_id.replace('/', '--')}"
