"""The harness's own command line, which knows ``--model deepseek_attn``.

    python -m deepseek_attn.lab.lm_eval --model deepseek_attn --model_args pretrained=DIR --tasks hellaswag

The harness (0.4.13) finds models in its registry alone, and has no entry points: so this module registers ours first.
"""

from __future__ import annotations

import sys


def main() -> None:
    try:
        import deepseek_attn.lab.lm_eval.model  # noqa: F401 registers it
    except ModuleNotFoundError as error:
        sys.exit(str(error))
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportAttributeAccessIssue]  # the extra lm-eval

    cli_evaluate()


if __name__ == "__main__":
    main()
