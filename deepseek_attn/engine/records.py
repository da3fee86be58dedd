"""Which requests of an `LLM` are recorded, and where to; records of the requests of a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, TypedDict, Unpack

from deepseek_attn.engine.decoding import Work
from deepseek_attn.engine.request import Request
from deepseek_attn.runner import ModelRunner, StepOptions, StepOutput
from deepseek_attn.runner.replay import Replayed
from deepseek_attn.runner.token_records import RecordOptions, record_path
from deepseek_attn.utils.files import check_output


class RecordArguments(TypedDict, total=False):
    """Keyword arguments of `LLM.generate`, `generate_iter` and `stream`; each may be left out.

    Attributes:
        return_routes: record the experts of each token and their weights: `Completion.records`.
        return_selections: record the entries that indexers select, and V4.1's candidates.
        return_hidden_states: numbers of the layers after which hidden states are recorded.
        record_dir: write the records of prompt ``i`` to ``i.safetensors`` in this folder, so that memory does not limit
            them, and of its other completions to ``i-1.safetensors`` and so on.
        record_file: instead, write the records of the only completion of the only prompt to this file.
    """

    return_routes: bool
    return_selections: bool
    return_hidden_states: Iterable[int]
    record_dir: str | Path | None
    record_file: str | Path | None


def named(argument: str) -> str:
    """An unknown argument; one of vLLM's with its name here."""
    here = {"sampling_params": "params", "use_tqdm": "progress"}.get(argument)
    return argument if here is None else f"{argument} (vLLM's name; it is {here} here)"


@dataclass(frozen=True)
class Recording:
    """The records of each request of a call.

    Attributes:
        options: the records to make; None: no records.
        directory, file: the folder of the files, or the only file; None: records stay in memory.
    """

    runner: ModelRunner
    options: RecordOptions | None = None
    directory: Path | None = None
    file: Path | None = None

    @classmethod
    def create(cls, runner: ModelRunner, **arguments: Unpack[RecordArguments]) -> Self:
        """Checks the arguments, and makes the folder.

        Raises:
            ValueError: unknown arguments, nothing to record, options that `ModelRunner.record_options` refuses, or a
                folder or file that cannot be written to.
        """
        unknown = sorted(arguments.keys() - RecordArguments.__annotations__.keys())
        if unknown:
            raise ValueError(
                f"no such arguments: {', '.join(map(named, unknown))}; beside those that help() lists there are "
                f"{', '.join(RecordArguments.__annotations__)}"
            )
        directory, file = arguments.get("record_dir"), arguments.get("record_file")
        wanted = [arguments.get(name) for name in ("return_routes", "return_selections", "return_hidden_states")]
        routes, selections, states = wanted
        if not routes and not selections and states in (None, (), []):
            if directory is not None or file is not None:
                raise ValueError(
                    "record_dir or record_file without anything to record: pass return_routes=True, for instance"
                )
            return cls(runner)
        if directory is not None and file is not None:
            raise ValueError("record_dir beside record_file: pass one of them")
        options = runner.record_options(routes or False, selections or False, states or ())
        if directory is not None:
            record_path(directory, "0")
        if file is not None:
            check_output(file, "record_file")
        return cls(runner, options, *(None if path is None else Path(path) for path in (directory, file)))

    def watch(self, request: Request, index: int, replay: Replayed | None) -> Request:
        """Sets up records and ``replay`` for a new request and for all completions of its prompt.

        Raises:
            ValueError: records that cannot be replayed for its prompt, or one file for several completions.
        """
        if self.file is not None and (index or request.others):
            raise ValueError("record_file is for one completion of one prompt: pass record_dir, a folder")
        played = None if replay is None else self.runner.make_replay(replay, request.prompt_token_ids)
        for number, each in enumerate(request.group):
            each.replay = played
            if self.options is not None:
                name = f"{index}-{number}" if number else str(index)
                path = self.file if self.directory is None else record_path(self.directory, name)
                each.store = self.runner.record_store(self.options, path)
        return request


def with_records(options: StepOptions, work: Work) -> StepOptions:
    """The options, with the records and replays of each request."""
    if all(request.takes_computed for request, _ in work):
        return options
    record = tuple(None if request.store is None else request.store.options for request, _ in work)
    return replace(options, record=record, replay=tuple(request.replay for request, _ in work))


def keep_records(work: Work, output: StepOutput) -> None:
    """Stores the records of a step's tokens."""
    if output.records is not None:
        for (request, _), records in zip(work, output.records, strict=True):
            if records is not None:
                request.keep_records(records)
