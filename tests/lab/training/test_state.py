"""An interrupted training goes on to the same weights, and its state is only its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from deepseek_attn.cli import main
from deepseek_attn.lab.training import MtpTraining, TextTask, train
from deepseek_attn.lab.training.state import TrainingState
from tests.support.small_models import small_config
from tests.support.tiers import tiered
from tests.support.typed import required

TEXT = "The cat sat on the mat, and the dog lay by the door. " * 100
SETTINGS = {"steps": 4, "seed": 0}


SMALL = {"vocab_size": 300, "hc_sinkhorn_iters": 2, "moe_intermediate_size": 32, "num_attention_heads": 2}


def run(state=None, stop_at=None):
    """A training of 4 steps and 2 of the MTP layer, stopped by Ctrl-C at a step whose loss is reported."""
    config = small_config([0, 4], **SMALL, num_nextn_predict_layers=1)

    def progress(step, loss):
        if step == stop_at:
            raise KeyboardInterrupt

    task, mtp = TextTask.from_text(TEXT, vocab_size=300), MtpTraining(steps=2, depth=1)
    return train(config, task, steps=4, batch=1, seq_len=24, mtp=mtp, test_batches=1, progress=progress, state=state,
                 device="cpu")  # fmt: skip


@pytest.fixture(scope="module")
def whole():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepseek_attn.lab.training.loop.REPORT_EVERY", 2)
        return run()


@pytest.fixture(autouse=True)
def _save_each_step(monkeypatch):
    monkeypatch.setattr("deepseek_attn.lab.training.state.SAVE_SECONDS", 0.0)
    monkeypatch.setattr("deepseek_attn.lab.training.loop.REPORT_EVERY", 2)


@pytest.mark.parametrize("stop_at", tiered([2, 6], [6]))
def test_a_training_that_goes_on_ends_as_one_that_was_not_interrupted(whole, tmp_path, stop_at):
    """In the backbone's steps, before entries are selected, and in those of the MTP layer."""
    path = tmp_path / "state"
    with pytest.raises(KeyboardInterrupt):
        run(TrainingState(path, SETTINGS), stop_at)
    state = TrainingState(path, SETTINGS, resume=True)
    result = run(state)
    assert result.losses == whole.losses
    assert required(result.mtp).losses == whole.mtp.losses
    assert result.metrics == whole.metrics
    for name, value in whole.model.state_dict().items():
        assert torch.equal(result.model.state_dict()[name], value), name
    state.remove()
    assert not path.exists()


def test_a_state_is_not_taken_for_another_training(tmp_path):
    path = tmp_path / "state"
    with pytest.raises(KeyboardInterrupt):
        run(TrainingState(path, SETTINGS), 2)
    with pytest.raises(ValueError, match="go on with it \\(--resume\\), or remove it"):
        TrainingState(path, SETTINGS)
    with pytest.raises(ValueError, match="is of a training with steps 4, not 9"):
        TrainingState(path, SETTINGS | {"steps": 9}, resume=True)
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    with pytest.raises(ValueError, match="cannot be read"):
        TrainingState(path, SETTINGS, resume=True)
    path.write_text("mine")
    for resume in (False, True):
        with pytest.raises(ValueError, match="was not written by `deepseek-attn train`"):
            TrainingState(path, SETTINGS, resume=resume)
    assert path.read_text() == "mine"


@pytest.mark.exhaustive
def test_the_command_resumes_and_loads_nothing_when_nothing_is_left(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(small_config([0, 4], **SMALL, num_nextn_predict_layers=1).to_dict()))
    command = (
        "train --config config.json --task copy --gap 8 --steps 2 --batch 1 --seq-len 42 --mtp-steps 1 --mtp-depth 1"
    )
    command = [*command.split(), "--device", "cpu", "--out", "new/model"]
    stop = "deepseek_attn.lab.training.loop.evaluate"
    with monkeypatch.context() as patch:
        patch.setattr(stop, lambda *args, **kwargs: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main(command) == 130
    assert "with --resume goes on from new/model.training-state" in capsys.readouterr().err
    assert main(command) == 2
    assert "go on with it (--resume)" in capsys.readouterr().err
    assert main([*command, "--resume"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["model"]
    monkeypatch.setattr("deepseek_attn.lab.training.loop.build_model", None)
    assert main([*command, "--resume"]) == 0
    assert json.loads(capsys.readouterr().out) == facts
    assert main(["train", "--resume"]) == 2
