"""A worker process: reads units to do from standard input, writes what becomes of them to standard output.

Run as ``python -m deepseek_attn.experiments.run.worker EXPERIMENT FOLDER DEVICE``.
One line per unit comes in, its path;
JSON lines go out: ``{"progress": 0.3}``, and at the end ``{"done": path}`` or ``{"error": text}``. When the process
that started it is gone, its pipes break and the worker ends.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path

PROGRESS_S = 0.5  # between two lines of progress


def main(origin: str, folder: str, device: str) -> None:
    """Does units until standard input ends."""
    # what libraries print goes to the log; standard output is for the one who started this process
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def send(**message: object) -> None:
        try:
            print(json.dumps(message), file=channel, flush=True)
        except BrokenPipeError:
            os._exit(1)

    import torch

    from deepseek_attn.experiments.define.config import load_experiment
    from deepseek_attn.experiments.define.units import make_units
    from deepseek_attn.experiments.run.records import write_record
    from deepseek_attn.experiments.run.work import perform

    experiment = load_experiment(origin)
    units = {unit.path: unit for unit in make_units(experiment, device)}
    send(ready=True)
    for line in sys.stdin:
        unit = units[line.strip()]
        last, start = 0.0, time.monotonic()

        def progress(part: float) -> None:
            nonlocal last
            if time.monotonic() - last >= PROGRESS_S:
                last = time.monotonic()
                send(progress=part)

        try:
            result = perform(unit, experiment, torch.device(device), Path(folder), progress)
            write_record(Path(folder), unit, result, time.monotonic() - start)
        except Exception as error:
            traceback.print_exc()
            send(error=f"{type(error).__name__}: {error}")
        else:
            send(done=unit.path)


if __name__ == "__main__":
    main(*sys.argv[1:])
