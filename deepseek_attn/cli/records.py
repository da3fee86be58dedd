"""``--records`` and ``--replay`` of ``generate`` and ``score``: the layers' choices, one file for each prompt."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from deepseek_attn.cli.terminal import say

if TYPE_CHECKING:
    from deepseek_attn.engine.completion import Completion
    from deepseek_attn.engine.llm import LLM
    from deepseek_attn.engine.records import RecordArguments

SUFFIX = ".safetensors"


def add_record_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--records",
        metavar="DIR|FILE",
        help="write the experts and the selected entries of each token: of prompt i to i.safetensors in this folder, "
        "or of a single prompt to this .safetensors file",
    )
    parser.add_argument(
        "--replay",
        metavar="DIR|FILE",
        help="compute with the experts and entries of --records in this folder, or of a single prompt in this file",
    )


def check_records(args: argparse.Namespace, single: bool) -> None:
    """Checks the flags before a model is loaded.

    Args:
        single: the command runs one prompt with one completion.

    Raises:
        ValueError: the folder or file of ``--records`` cannot be written, or it is a file for several prompts.
    """
    from deepseek_attn.runner.token_records import record_path
    from deepseek_attn.utils.files import check_output

    if args.records is not None and is_file(args.records):
        if not single:
            raise ValueError(f"--records {args.records}: a file is for one completion of one prompt: name a folder")
        check_output(args.records, "--records")
    elif args.records is not None:
        record_path(args.records, "0")
    check_replay(args.replay, None if args.prompts is None else "--prompts needs")


def check_replay(replay: str | None, several: str | None) -> None:
    """Checks ``--replay`` before a model is loaded.

    Args:
        several: beginning of the message for several prompts; None for one prompt.

    Raises:
        ValueError: the path does not exist, or is a file although there are several prompts.
    """
    if replay is None:
        return
    if not Path(replay).exists():
        raise ValueError(f"--replay {replay}: no such file or folder: write it with --records")
    if several is not None and not Path(replay).is_dir():
        raise ValueError(f"--replay {replay}: {several} a folder, with i{SUFFIX} for prompt i")


def is_file(records: str) -> bool:
    """Whether ``--records`` names a file and not a folder."""
    return Path(records).suffix == SUFFIX and not Path(records).is_dir()


def record_arguments(llm: LLM, records: str | None) -> RecordArguments:
    """Keyword arguments for ``--records``: record every choice of the model's layers."""
    if records is None:
        return {}
    found: RecordArguments = {
        "return_routes": True,
        "return_selections": any(spec.has_indexer for spec in llm.runner.config.layers),
    }
    if is_file(records):
        found["record_file"] = records
    else:
        found["record_dir"] = records
    return found


def record_file(records: str, index: int) -> Path:
    """The file of the first completion of the prompt of this index in the folder of ``--records``."""
    return Path(records) / f"{index}{SUFFIX}"


def replay_file(replay: str, index: int = 0) -> Path:
    """The file of ``--replay`` for the prompt of this index."""
    return record_file(replay, index) if Path(replay).is_dir() else Path(replay)


def say_recorded(completion: Completion, records: str | None) -> None:
    """Prints how many tokens of a prompt ``--records`` holds."""
    if completion.records is not None:
        say(f"records of {len(completion.records)} tokens -> {records}")
