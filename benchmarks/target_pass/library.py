"""flash-linear-attention's own model on the same weights: prefill and `generate` as shipped, both in a CUDA graph.

The graph of decoding holds one step of the library's model with its cache as it stands: a replay computes the same step
again, which takes the time of any other. The library's kernels tune themselves when they first run, minutes of
compiling on one core; `python -m specla.benchmarks.target_pass.library PART TOKENS` does that for a part, and what it
found stays in Triton's cache.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from specla.benchmarks.kernels.replay import MissingLibraryError
from specla.benchmarks.target_pass.model import DTYPE, SHAPE, RandomTensors
from specla.verifier_service.targets.config import GatedDeltaNetConfig

PROMPT = 64
TOKENS = 16
_WARMING_S = 150.0
_WARMED_LAYERS = 2  # as good as all: they are alike
_PARTS = ("prefill", "decoding")


def warm(tokens: int) -> dict[str, str]:
    """Lets the library's kernels tune themselves, in a process for each part ("prefill", "decoding"), all at once.

    Returns:
        Of each part that failed or took too long, what happened.
    """
    until, failed = time.monotonic() + _WARMING_S, {}
    started = {part: _start(part, tokens) for part in _PARTS}
    for part, process in started.items():
        try:
            said, _ = process.communicate(timeout=max(until - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            failed[part] = f"its kernels were not tuned after {_WARMING_S:.0f} s"
        else:
            if process.returncode:
                failed[part] = (said.strip().splitlines() or ["no message"])[-1]
    return failed


def _start(part: str, tokens: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "specla.benchmarks.target_pass.library", part, str(tokens)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def library_model(config: GatedDeltaNetConfig, device: str = "cuda") -> Any:
    """The library's model with the weights of `RandomTensors`. Importing it takes some ten seconds.

    Raises:
        MissingLibraryError: it is not installed, or does not import here.
    """
    try:
        from fla.models import GatedDeltaNetConfig as LibraryConfig
        from fla.models import GatedDeltaNetForCausalLM
    except Exception as error:  # whatever an optional package's import may raise
        raise MissingLibraryError(f"flash-linear-attention is not usable: {type(error).__name__}: {error}") from error
    made = LibraryConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        expand_v=config.expand_v,
        use_gate=config.use_gate,
        conv_size=config.conv_size,
        intermediate_size=config.mlp_dim,
        norm_eps=config.norm_eps,
        tie_word_embeddings=config.tie_word_embeddings,
    )
    with torch.device("meta"):
        model = GatedDeltaNetForCausalLM(made).to(DTYPE)
    tensors = RandomTensors(config, device)
    weights = {name: tensors[name].to(DTYPE) for name in tensors}
    model.load_state_dict(weights, strict=True, assign=True)
    return model.to(device).eval()


@torch.inference_mode()
def generate_us(model: Any, rounds: int) -> list[float]:
    """Microseconds a token of `generate`, greedy, one session, the prompt's pass taken off."""
    prompt = torch.arange(1, PROMPT + 1, device="cuda")[None]
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "attention_mask": torch.ones_like(prompt)}

    def seconds(tokens: int) -> float:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        model.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, **options)
        torch.cuda.synchronize()
        return time.perf_counter() - begun

    seconds(2)
    return [(seconds(TOKENS + 1) - seconds(1)) / TOKENS * 1e6 for _ in range(rounds)]


def _captured(launch: Callable[[], None]) -> Callable[[], None]:
    """Replays what was launched, tried outside the graph first; `launch` lives on, whose tensors the graph reads."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            launch()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return partial(_replay, graph, launch)


def _replay(graph: torch.cuda.CUDAGraph, _launch: Callable[[], None]) -> None:
    graph.replay()


@torch.inference_mode()
def captured_step(model: Any) -> Callable[[], None]:
    """Replays one decoding step, greedy choice included.

    Raises:
        Exception: whatever the library's model raises where it cannot be captured.
    """
    prompt = torch.arange(1, PROMPT + 1, device="cuda")[None]
    cache = model(prompt, use_cache=True).past_key_values
    token = torch.zeros(1, 1, dtype=torch.long, device="cuda")

    def step() -> None:
        logits = model(token, past_key_values=cache, use_cache=True).logits
        token.copy_(logits[:, -1:].argmax(-1))

    return _captured(step)


@torch.inference_mode()
def prefill(model: Any, tokens: int) -> Callable[[], None]:
    """The library's pass over a prompt of so many tokens, logits of the last one only, states kept."""
    prompt = (torch.arange(tokens, device="cuda") * 7 % 32_000)[None]

    def run() -> None:
        with torch.inference_mode():
            model(prompt, use_cache=True, logits_to_keep=1)

    return run


@torch.inference_mode()
def captured_prefill(model: Any, tokens: int) -> Callable[[], None]:
    """The same in a CUDA graph.

    Raises:
        Exception: whatever the library's model raises where it cannot be captured.
    """
    return _captured(prefill(model, tokens))


def _main(part: str, tokens: int) -> None:
    """Runs one of the parts until its kernels are ready."""
    model = library_model(replace(SHAPE, num_hidden_layers=_WARMED_LAYERS))
    if part == "prefill":
        prefill(model, tokens)()
    else:
        generate_us(model, 1)
    torch.cuda.synchronize()


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
