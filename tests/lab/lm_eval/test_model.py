"""lm-evaluation-harness over a checkpoint: numbers of its tasks, without a network, equal to a computation by hand."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

pytest.importorskip("lm_eval", reason="pip install 'deepseek-attn[lm-eval]'")

from lm_eval import simple_evaluate  # pyright: ignore[reportAttributeAccessIssue]  # an extra
from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]  # an extra
from lm_eval.api.registry import get_model  # pyright: ignore[reportMissingImports]  # an extra
from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]  # an extra

from deepseek_attn.engine.sampling import SamplingParams
from deepseek_attn.lab.lm_eval.model import DeepseekAttnLM
from tests.support.typed import required

QUESTIONS = [
    {"question": "It is a truth universally", "choices": [" acknowledged", " green", " potato cake"], "answer": 0},
    {"question": "She was", "choices": [" xylophone", " not"], "answer": 1},
    {"question": "My dear Mr.", "choices": [" Bennet", " Zzz"], "answer": 1},
]
COMMON = """
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}}}
test_split: test
"""
TASKS = {
    "choose": """
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
""",
    "read": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list:
  - metric: word_perplexity
""",
    "write": """
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs:
  until: ["."]
  max_gen_toks: 8
metric_list:
  - metric: exact_match
""",
}


@pytest.fixture(scope="module")
def model() -> DeepseekAttnLM:
    return get_model("deepseek_attn").create_from_arg_string("max_model_len=120,dtype=float32", {"device": "cpu"})


def by_hand(model: DeepseekAttnLM, context: list[int], rest: list[int]) -> tuple[float, bool]:
    """Log-probability of the tokens after a context, and whether each is the likeliest, from whole rows of logits."""
    (logits,) = model.llm.runner.score([context + rest])
    rows = logits[len(context) - 1 : -1].double().log_softmax(-1)
    tokens = torch.tensor(rest)
    return float(rows.gather(1, tokens[:, None]).sum()), bool((rows.argmax(1) == tokens).all())


def requests(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def ids_of(model: DeepseekAttnLM, text: str) -> list[int]:
    return required(model.llm.tokenizer).encode_prompt(text)


def test_tasks(model, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    file = tmp_path / "questions.jsonl"
    file.write_text("\n".join(map(json.dumps, QUESTIONS)))
    for name, task in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}{COMMON.format(file=file)}{task.format()}")
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = simple_evaluate(model, tasks=list(TASKS), task_manager=tasks, bootstrap_iters=0, cache_requests=False)

    def score(question: dict, choice: str) -> float:
        context = ids_of(model, question["question"])
        return by_hand(model, context, ids_of(model, question["question"] + choice)[len(context) :])[0]

    right = 0
    for question in QUESTIONS:
        scores = [score(question, choice) for choice in question["choices"]]
        right += scores.index(max(scores)) == question["answer"]
    assert found["results"]["choose"]["acc,none"] == pytest.approx(right / len(QUESTIONS))
    total = sum(by_hand(model, [ids[0]], ids[1:])[0] for ids in (ids_of(model, q["question"]) for q in QUESTIONS))
    words = sum(len(q["question"].split()) for q in QUESTIONS)
    perplexity = float(torch.tensor(-total / words, dtype=torch.float64).exp())
    assert found["results"]["read"]["word_perplexity,none"] == pytest.approx(perplexity, rel=1e-5)
    samples = [sample["resps"][0][0] for sample in found["samples"]["write"]]
    for question, text in zip(QUESTIONS, samples, strict=True):
        ids, tokenizer = ids_of(model, question["question"]), model.llm.tokenizer
        new: list[int] = []
        while len(new) < 8 and "." not in tokenizer.decode(new):
            new.append(int(model.llm.runner.score([ids + new])[0][-1].argmax()))
        assert text == tokenizer.decode(new).partition(".")[0]


def test_likelihoods(model):
    """Greedy continuations are known as such; a context may be empty or end in a space."""
    context = ids_of(model, "She was")
    greedy = int(model.llm.runner.score([context])[0][-1].argmax())
    word = model.llm.tokenizer.decode([greedy])
    pairs = [("She was", word), ("She was", " xylophone"), ("", "It is"), ("She was ", "not")]
    found = model.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    assert [is_greedy for _, is_greedy in found] == [True, False, False, False]
    bos = [model.prefix_token_id]
    for (score, _), (text, rest) in zip(found, [("She was", word), ("She was", " xylophone")], strict=False):
        context = ids_of(model, text)
        assert score == pytest.approx(by_hand(model, context, ids_of(model, text + rest)[len(context) :])[0], abs=1e-5)
    assert found[2][0] == pytest.approx(by_hand(model, bos, model.llm.tokenizer.encode("It is"))[0], abs=1e-5)
    context = ids_of(model, "She was")
    whole = ids_of(model, "She was not")
    assert found[3][0] == pytest.approx(by_hand(model, context, whole[len(context) :])[0], abs=1e-5)


def test_long_texts_lose_their_beginning(model):
    """As many tokens as `hf` keeps with ``max_length`` of one less than ours: 119 of context and one more."""
    context, rest = [5 + i % 300 for i in range(200)], [7, 8, 9]
    ((score, _),) = model._loglikelihood_tokens([(None, context, rest)], disable_tqdm=True)
    assert score == pytest.approx(by_hand(model, (context + rest)[-120:-3], rest)[0], abs=1e-5)
    with pytest.raises(ValueError, match="a continuation of 120 tokens: at most 119"):
        model._loglikelihood_tokens([(None, [0], [7] * 120)])


def test_a_text_of_several_windows(model):
    """Each token counts once; windows of 119 tokens, the context of the last one filled up with earlier tokens."""
    text = "It is a truth universally acknowledged that she was not at all handsome. " * 17
    ids = model.llm.tokenizer.encode(text)
    assert 2 * 119 < len(ids) < 4 * 119
    tokens, expected = [model.prefix_token_id, *ids], 0.0
    for start in range(0, len(ids), 119):
        end = min(start + 119, len(ids))
        first = 0 if start == 0 else max(0, end - 119)
        expected += by_hand(model, tokens[first : start + 1], tokens[start + 1 : end + 1])[0]
    (found,) = model.loglikelihood_rolling(requests("loglikelihood_rolling", (text,)), disable_tqdm=True)
    assert found == pytest.approx(expected, abs=1e-3)


def test_generation_options(model):
    with pytest.raises(ValueError, match="generation options num_beams: supported are temperature, top_k"):
        model.generate_until(requests("generate_until", ("It is", {"num_beams": 4, "max_gen_toks": 4})))
    with pytest.raises(ValueError, match="max_gen_toks=120 leaves no context"):
        model.generate_until(requests("generate_until", ("It is", {"max_gen_toks": 120})))
    long = "She was not at all handsome. " * 60
    options = {"until": "\n", "max_gen_toks": 4, "do_sample": True, "temperature": 0.9, "seed": 3}
    greedy = {"until": "\n", "max_gen_toks": 4}
    found = model.generate_until(requests("generate_until", (long, options), (long, greedy)), disable_tqdm=True)
    assert found[0]
    kept = ids_of(model, long)[-116:]
    assert found[1] == model.llm.generate([kept], SamplingParams(temperature=0, max_tokens=4, stop="\n"))[0].text
    assert model.generate_until([]) == []


def test_chats(model):
    turns = [{"role": "user", "content": "How do you do?"}]
    text = model.apply_chat_template(turns)
    assert model.tok_encode(text) == model.llm.chat_prompt(turns)[0]
    begun = model.apply_chat_template([*turns, {"role": "assistant", "content": "Very"}], add_generation_prompt=False)
    assert begun.endswith("Very")
    assert model.chat_template(True)
    assert model.chat_template(False) is None
    assert model.tokenizer_name == str(model.llm.directory)


def test_arguments_may_have_names_of_the_harness_own():
    found = DeepseekAttnLM.create_from_arg_obj(
        {"device": "cpu", "max_model_len": 64}, {"device": "cuda", "batch_size": 2}
    )
    assert (found.llm.runner.device.type, found.llm.runner.layout.max_model_len) == ("cpu", 64)


def test_the_command_knows_it():
    """A wrong task, or a wrong checkpoint, is one message."""
    done = subprocess.run(
        [sys.executable, "-m", "deepseek_attn.lab.lm_eval", "--model", "deepseek_attn", "--tasks", "no_such_task"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 2
    assert "lm_eval: error: Tasks not found: no_such_task" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_entry_point_names_it():
    """Of the group in which releases of the harness after 0.4.13 look for models."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    [(name, value)] = project["entry-points"]["lm_eval.models"].items()
    assert EntryPoint(name, value, "lm_eval.models").load() is get_model(name)
