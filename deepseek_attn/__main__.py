"""``python -m deepseek_attn``: the command line, for launchers such as torchrun that start modules."""

import sys

from deepseek_attn.cli import main

sys.exit(main())
