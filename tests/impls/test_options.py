"""Attention options of a runner: one impl per phase, prefill over pages or gathered rows, rows of the workspace."""

import pytest
import torch

from deepseek_attn.cli import main
from deepseek_attn.impls import DeepseekV4ReferenceSparseImpl, combine_phases, flow
from deepseek_attn.impls.options import AttentionOptions
from deepseek_attn.runner.model_runner import ModelRunner
from tests.support.small_models import assert_same_codes, two_layers
from tests.support.tiers import exhaustive_on_cpu, tiered

PROMPTS = [[0, *range(5, 160)], [0, 7, 9], [0, *range(300, 220, -1)]]


def runner(config=None, **options):
    sizes = {"max_model_len": 200, "max_num_seqs": 4, "max_num_batched_tokens": 100}
    return ModelRunner.from_config(config or two_layers(), device="cpu", **sizes, **options)


class Other(DeepseekV4ReferenceSparseImpl):
    """The reference under another name, which pads heads; counts its calls."""

    name = "other"
    calls: list = []  # noqa: RUF012

    @classmethod
    def padded_heads(cls, num_heads):
        return num_heads + 3

    @classmethod
    def attend_pages(cls, *args):
        cls.calls.append("pages")
        return super().attend_pages(*args)

    @classmethod
    def attend_rows(cls, *args):
        cls.calls.append("rows")
        return super().attend_rows(*args)


@pytest.mark.parametrize(
    ("decode", "prefill", "called"),
    [pytest.param(Other, None, {"pages"}, marks=pytest.mark.exhaustive), (None, Other, {"rows"})],
)
def test_each_phase_has_its_impl(decode, prefill, called):
    reference, Other.calls = DeepseekV4ReferenceSparseImpl, []
    impl = combine_phases(decode or reference, prefill or reference)
    assert impl.name == ("other+reference" if decode else "reference+other")
    machine = runner()
    expected = machine.score(PROMPTS, 30)
    for block in machine.model.layers.values():
        assert block.attn.impl is reference
        block.attn.impl = impl
        assert impl.padded_heads(block.attn.num_heads) == block.attn.padded_heads
    for logits, same in zip(machine.score(PROMPTS, 30), expected, strict=True):
        assert torch.equal(logits, same)
    machine.score([PROMPTS[1]], 1)
    assert set(Other.calls) == called


def test_one_impl_for_both_phases_is_itself():
    assert combine_phases(Other, Other) is Other


@pytest.mark.parametrize(("config", "numerics"), tiered([(None, "exact"), ("tiny", "official")], [(None, "exact")]))
def test_mixed_prefill_gathers_nothing_and_computes_the_same(monkeypatch, config, numerics):
    gathered, gather = [], flow.gather_keys
    monkeypatch.setattr(flow, "gather_keys", lambda *args: gathered.append(1) or gather(*args))
    mixed, separate = (runner(config, fp8_mode=mode, numerics=numerics) for mode in ("mixed", "separate"))
    assert mixed.workspace.nbytes() == 0 < separate.workspace.nbytes()
    results = []
    for machine in (mixed, separate):
        results.append(machine.score(PROMPTS, 64))
        assert bool(gathered) == (machine is separate)
    for a, b in zip(*results, strict=True):
        # in seven layers of quantised products, a value that crosses the boundary of two codes may change a choice
        assert_same_codes(a, b, largest=1e-4 if numerics == "exact" else 1.0)


@pytest.mark.exhaustive
def test_a_workspace_of_one_request_computes_the_same():
    config = two_layers()
    rows = -(-200 // min(s.ratio for s in config.layers if s.ratio)) + config.sliding_window + 100
    small, whole = runner(prefill_workspace_rows=rows), runner()
    assert small.workspace.nbytes() * 4 == whole.workspace.nbytes()
    for a, b in zip(small.score(PROMPTS, 33), whole.score(PROMPTS, 33), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match=f"prefill_workspace_rows={rows - 1}: one request .* needs {rows}; raise"):
        runner(prefill_workspace_rows=rows - 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decode_backend": "flashmla"}, "backend 'flashmla' cannot run on cpu: FlashMLA needs an NVIDIA GPU"),
        ({"prefill_backend": "tritonn"}, "unknown backend 'tritonn': supported are auto, mixed, flashmla"),
        ({"fp8_mode": "both"}, "fp8_mode='both': supported are auto, mixed, separate"),
        ({"prefill_workspace_rows": 1.5}, r"prefill_workspace_rows=1\.5: must be an integer"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        runner(**options)


def test_reference_only_needs_both_phases():
    assert AttentionOptions("reference").reference_only
    assert AttentionOptions(decode_backend="reference", prefill_backend="reference").reference_only
    assert not AttentionOptions("reference", prefill_backend="auto").reference_only


@exhaustive_on_cpu
def test_the_command_line_sets_them(capsys):
    command = ["generate", "--device", "cpu", "--prompt", "Once upon a time", "--temperature", "0", "--max-tokens", "6"]
    assert main(command) == 0
    expected = capsys.readouterr().out
    assert main([*command, "--fp8-mode", "mixed", "--decode-backend", "reference"]) == 0
    assert capsys.readouterr().out == expected
    assert main([*command, "--fp8-mode", "separate", "--prefill-workspace-rows", "9"]) == 2
    assert "prefill_workspace_rows=9: one request of max_model_len=" in capsys.readouterr().err
    assert main(["info"]) == 0
    assert "prefill_workspace_rows=None" in capsys.readouterr().out
