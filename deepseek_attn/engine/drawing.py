"""Drawing tokens: logits -> next tokens, each request by its own parameters and its own random numbers.

The host does not wait for the device: copies to the device are ordered with the launches.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch

from deepseek_attn.engine.sampling import MASK64, SamplingParams
from deepseek_attn.kernels.sampling import INVALID_TOKEN
from deepseek_attn.utils.device import to_device
from deepseek_attn.utils.tracing import traced

WEIGHT_BITS = 44  # weights are integers up to 2**44; the sum over a vocabulary of 2**18 stays below 2**63
MAX_VOCAB = 1 << (62 - WEIGHT_BITS)
ELEMENTS_PER_BLOCK = 1 << 22  # rows are processed in blocks of about this many logits: scratch below 256 MiB


class CounterGenerator:
    """Uniform random numbers as a pure function of (key, position): splitmix64 over a counter.

    Nothing but ``position`` changes, so a request that is paused and recomputed continues exactly by setting it.
    """

    def __init__(self, key: int):
        self.key = key & MASK64
        self.position = 0

    def uniform(self) -> float:
        """The next number in [0, 1), with 53 random bits."""
        self.position += 1
        return (_mix64(self.key + self.position * 0x9E3779B97F4A7C15) >> 11) * 2.0**-53


def make_generator(params: SamplingParams, request_index: int = 0, completion: int = 0) -> CounterGenerator:
    """Random numbers of one request.

    With a seed, the stream is a function of (seed, ``request_index``, ``completion``): requests of one call that share
    their parameters, and the n completions of a prompt, get different streams, and each is reproducible. Without a
    seed, every call gives a fresh stream.
    """
    if params.seed is None:
        return CounterGenerator(secrets.randbits(64))
    key = _mix64(_mix64(params.seed) + request_index * 0xD1342543DE82EF95)
    return CounterGenerator(_mix64(key + completion * 0xAF251AF3B0F025B5) if completion else key)


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], generators: Sequence[CounterGenerator | None]
) -> torch.Tensor:
    """Choose the next token of each row.

    Order: temperature, then min-p, top-k, and top-p over the remaining tokens. Exactly ``top_k`` tokens are kept, and
    ties go to the lower index; at least one token is always kept. Nothing else of ``params`` is applied.

    Args:
        logits: ``[B, vocab]`` float32; -inf masks a token.
        params: one per row.
        generators: one per row, advanced by one number per sampled row; unused (may be None) for greedy rows.

    Returns:
        int64 ``[B]`` on the device of ``logits``.

    Raises:
        ValueError: wrong shape, dtype or number of parameters.
        RuntimeError: a row holds NaN or +inf, or nothing but -inf.

    Notes:
        Probabilities are fixed-point integers (2**-44 of the largest one), because integer sums do not depend on the
        order of addition: a row's token depends on the row, its parameters and its generator, never on the batch
        around it. Tokens less likely than 2**-45 of the likeliest are never drawn.
    """
    tokens = sample_valid(logits, params, generators)
    broken = tokens == INVALID_TOKEN
    if broken.any():
        raise RuntimeError(
            f"cannot sample from logits rows {broken.nonzero().flatten().tolist()}: they hold NaN or +inf, or every "
            "token is masked with -inf; the model's output is broken at these rows, so check the weights and the "
            "numerics preset"
        )
    return tokens


@traced("sample")
def sample_valid(
    logits: torch.Tensor, params: Sequence[SamplingParams], generators: Sequence[CounterGenerator | None]
) -> torch.Tensor:
    """`sample` without waiting for the device: `INVALID_TOKEN` for a row that holds NaN or +inf, or only -inf."""
    _check(logits, params, generators)
    resolved = [p.resolved() for p in params]
    if not resolved:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    peak = logits.amax(dim=-1)  # NaN if any is NaN
    valid = peak.isfinite()
    tokens = logits.argmax(dim=-1)  # the first of equal maxima
    plain = [i for i, p in enumerate(resolved) if not p.greedy and not p.top_k and p.top_p == 1]
    filtered = [i for i, p in enumerate(resolved) if not p.greedy and (p.top_k or p.top_p < 1)]
    block = max(1, ELEMENTS_PER_BLOCK // logits.shape[1])
    for rows, draw in ((plain, _draw_plain), (filtered, _draw_filtered)):
        for start in range(0, len(rows), block):
            chosen = rows[start : start + block]
            row_params, random = [resolved[i] for i in chosen], (generators[i] for i in chosen)
            uniform = _column([generator.uniform() for generator in random if generator is not None], logits)
            index = to_device(chosen, logits.device)
            usable = valid[index, None]
            row_logits, row_peak = logits[index].where(usable, 0.0), peak[index, None].where(usable, 0.0)
            tokens[index] = draw(row_logits, row_peak, row_params, uniform)
    return tokens.where(valid, INVALID_TOKEN)


def _draw_plain(logits, peak, params, uniform) -> torch.Tensor:
    """Inverse-CDF draw over the whole vocabulary, in index order."""
    mass = _weights(logits, peak, params).cumsum(dim=-1)
    return _pick(mass, mass[:, -1:], uniform).squeeze(-1)


def _draw_filtered(logits, peak, params, uniform) -> torch.Tensor:
    """Inverse-CDF draw over the tokens that top-k and top-p keep, in descending order."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    mass = _weights(ordered, peak, params).cumsum(dim=-1)
    vocab = logits.shape[1]
    last = to_device([min(p.top_k or vocab, vocab) - 1 for p in params], logits.device)[:, None]
    total = mass.gather(-1, last)  # of the tokens that top-k keeps
    top_p = _column([p.top_p for p in params], logits)
    needed = torch.where(top_p < 1, (top_p * total).ceil().to(torch.int64), total)
    last = torch.searchsorted(mass, torch.minimum(needed, total).clamp(min=1))
    return order.gather(-1, _pick(mass, mass.gather(-1, last), uniform)).squeeze(-1)


def _weights(logits, peak, params) -> torch.Tensor:
    """``exp((logits - peak) / temperature)`` as int64 fixed point; 0 where it is below min-p."""
    temperature = _column([p.temperature for p in params], logits)
    scaled = (logits.double() - peak.double()) / temperature
    weights = scaled.exp_()
    if any(p.min_p for p in params):
        weights.masked_fill_(weights < _column([p.min_p for p in params], logits), 0.0)
    return (weights * 2.0**WEIGHT_BITS).round_().to(torch.int64)


def _pick(mass: torch.Tensor, total: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """``[R, 1]`` index of the first cumulative mass above ``uniform * total``."""
    target = (uniform * total).to(torch.int64)  # below the total: 1 - uniform >= 2**-53 outweighs float64's rounding
    return torch.searchsorted(mass, target, right=True)


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return to_device(torch.tensor(values, dtype=torch.float64, device="cpu"), like.device)[:, None]


def _check(logits, params, generators) -> None:
    if logits.dim() != 2 or logits.dtype != torch.float32 or not 0 < logits.shape[1] <= MAX_VOCAB:
        raise ValueError(
            f"logits must be float32 [B, vocab] with 1 <= vocab <= {MAX_VOCAB}, got {logits.dtype} "
            f"{list(logits.shape)}; convert with logits.float()"
        )
    if not len(params) == len(generators) == logits.shape[0]:
        raise ValueError(
            f"{logits.shape[0]} rows of logits need as many params and generators, got {len(params)} and "
            f"{len(generators)}"
        )
    missing = [i for i, (p, g) in enumerate(zip(params, generators, strict=True)) if g is None and not p.greedy]
    if missing:
        raise ValueError(f"rows {missing} have a temperature > 0 but no generator; use make_generator(params, index)")


def _mix64(value: int) -> int:
    """splitmix64's output function."""
    value &= MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)
