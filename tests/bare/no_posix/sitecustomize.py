"""First on ``PYTHONPATH``, takes away from Python what only POSIX systems have, as far as the library might use it."""

import importlib
import os
import signal
import sys

for package in ("huggingface_hub", "jinja2", "safetensors.torch", "tokenizers", "torch", "tqdm.auto"):
    importlib.import_module(package)  # these take the system's own way
sys.modules |= dict.fromkeys(("resource", "fcntl", "pwd", "termios", "triton"))
for module, names in (
    (os, ("fork", "sysconf", "sysconf_names", "sched_getaffinity", "register_at_fork", "nice")),
    (signal, ("SIGPROF", "setitimer", "ITIMER_PROF")),
):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
