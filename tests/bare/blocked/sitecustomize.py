"""First on ``PYTHONPATH``, makes optional packages look as if they were not installed; torch may have brought some."""

import sys

sys.modules |= dict.fromkeys(("triton", "flash_mla", "flashinfer", "transformers", "matplotlib", "ray", "llguidance"))
