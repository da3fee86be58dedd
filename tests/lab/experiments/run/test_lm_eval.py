"""Tasks of lm-evaluation-harness as qualities of models that an experiment trains."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("lm_eval", reason="pip install 'deepseek-attn[lm-eval]'")

from deepseek_attn.lab.experiments.define.config import read_experiment
from deepseek_attn.lab.experiments.define.units import Group, make_units
from deepseek_attn.lab.experiments.report.pareto import qualities
from deepseek_attn.lab.experiments.report.report import build_report
from deepseek_attn.lab.experiments.run.records import read_record
from deepseek_attn.lab.experiments.run.work import UnitWork
from tests.support.typed import required

TASK = """
task: choose
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
"""


def test_a_local_task_is_a_quality(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    questions = [{"question": "It is", "choices": [" a truth", " xylophone"], "answer": 0}] * 3
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "choose.yaml").write_text(TASK.format(file=tmp_path / "questions.jsonl"))
    raw = {
        "base": "1m", "base_changes": {"num_hidden_layers": 1, "compress_ratios": [0], "hidden_size": 64},
        "variants": [{"schedule": "4*"}, {"schedule": "4*", "selection": "random"}], "device": "cpu",
        "train": {"tasks": {"text": {"characters": 20_000}}, "steps": 2, "batch": 1, "seq_len": 16, "lengths": [1],
                  "eval_batches": 1},
        "quality": {"lm_eval": ["choose"], "limit": 2, "include_path": "tasks"},
    }  # fmt: skip
    experiment = read_experiment(raw, "exp.json", tmp_path)
    units, work = make_units(experiment, "cpu"), UnitWork(tmp_path / "out", "cpu", 1)
    work(units[0], lambda part: None)
    learned, control = units[1:]
    work(Group((learned,), False), lambda part: None)
    found = required(read_record(tmp_path / "out", learned))["result"]["lm_eval"]
    assert 0.0 <= found["choose acc"] <= 1.0
    report = build_report(experiment, tmp_path / "out", "cpu")
    assert qualities(report) == {"text loss": False, "text choose acc": True}
    work(Group((control,), False), lambda part: None)
    assert "lm_eval" not in required(read_record(tmp_path / "out", control))["result"], "no engine serves a control"
