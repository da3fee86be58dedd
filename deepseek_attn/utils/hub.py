"""Models by their id on the Hugging Face hub: copies in the local cache of huggingface_hub, and downloads into it."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

log = logging.getLogger(__name__)
HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>(?!.*\.\.)[\w./-]+))?")
CONFIG_FILE = "config.json"
SHOWN = 8  # files that the remedy lists; for more it fetches the whole repository
MAX_REASON = 300  # characters of the hub's own message


def check_path(path: object, needed: str) -> None:
    """ValueError for a path that is neither text nor a `Path`; ``needed`` begins the message."""
    if not isinstance(path, (str, os.PathLike)):
        raise ValueError(f"{needed}, got {path!r:.80} of type {type(path).__name__}")


@dataclass(frozen=True)
class HubModel:
    """A model repository.

    Attributes:
        repo_id: ``org/name``.
        revision: a branch, tag or commit; None: the main branch.
    """

    repo_id: str
    revision: str | None = None

    @classmethod
    def parse(cls, name: str | Path) -> HubModel | None:
        """The repository ``org/name`` or ``org/name@revision``; None if a file or folder has this name.

        Raises:
            ValueError: neither text nor a path.
        """
        check_path(name, "a model is named by its folder or hub id (org/name)")
        found = HUB_ID.fullmatch(name) if isinstance(name, str) and not Path(name).exists() else None
        return None if found is None else cls(found["repo"], found["revision"])

    def local_folder(self) -> Path | None:
        """The copy in the local cache, complete or not; None if it has no ``config.json``."""
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.repo_id, CONFIG_FILE, revision=self.revision)
        return Path(found).parent if isinstance(found, str) else None

    def download(self, files: Iterable[str], optional: Iterable[str] = (), whole: bool = False) -> Path:
        """The copy in the local cache, after adding ``files``, and the ``optional`` files that the repository has.

        A copy that is there keeps its commit. Nothing is downloaded under ``HF_HUB_OFFLINE=1``.

        Args:
            whole: other files will be needed too: the remedy of an error fetches all files.

        Raises:
            ValueError: a file is still missing; the message has the command that fetches it.
        """
        from huggingface_hub import constants, snapshot_download

        files, optional, folder = list(files), list(optional), self.local_folder()
        revision = self.revision if folder is None else folder.name
        reason = ""
        log.info("looking for %s of %s on the hub", ", ".join(files), self.repo_id)
        try:
            folder = Path(snapshot_download(self.repo_id, revision=revision, allow_patterns=[*files, *optional]))
        except Exception as error:  # an error of the hub, of an HTTP library below it, or of the file system
            reason = shorten(f"{type(error).__name__}: {error}", MAX_REASON)
        absent = [file for file in files if folder is None or not (folder / file).is_file()]
        if folder is not None and not absent:
            return folder
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else reason or "the repository has no such file"
        names = [] if whole or len(files) > SHOWN else [*files, *optional]
        command = ["hf download", self.repo_id, *names, *(["--revision", revision] if revision else [])]
        more = f" and {len(absent) - 1} more files" if len(absent) > 1 else ""
        raise ValueError(
            f"{self.repo_id!r} is not a local folder, and {absent[0]}{more} of it cannot be downloaded to the hub's "
            f"cache {constants.HF_HUB_CACHE} ({reason}): run `{' '.join(command)}` where "
            "there is a network, or pass the folder of a checkpoint"
        )
