"""The harness's own command line, which knows ``--model deepseek_attn``.

    python -m deepseek_attn.lab.lm_eval --model deepseek_attn --model_args pretrained=DIR --tasks hellaswag

The harness (0.4.13) looks models up in its registry and reads no entry points, so this module registers ours first.
"""

from __future__ import annotations

import sys

from deepseek_attn.cli import explanation
from deepseek_attn.cli.terminal import say


def main() -> None:
    try:
        import deepseek_attn.lab.lm_eval.model  # noqa: F401 registers it
    except ModuleNotFoundError as error:
        sys.exit(str(error))
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportAttributeAccessIssue]  # the extra lm-eval

    try:
        cli_evaluate()
    except Exception as error:
        if (message := explanation(error)) is None:
            raise
        say(f"lm_eval: error: {message}")
        sys.exit(2)


if __name__ == "__main__":
    main()
