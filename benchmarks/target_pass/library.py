"""flash-linear-attention's own model on the same weights: `generate` as shipped, a step of it in a CUDA graph, prefill.

The graph holds one decoding step of the library's model with its cache as it stands: a replay computes the same step
again, which takes the time of any other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from specla.benchmarks.kernels.replay import MissingLibraryError
from specla.benchmarks.target_pass.model import DTYPE, RandomTensors
from specla.verifier_service.targets.config import GatedDeltaNetConfig

PROMPT = 64
TOKENS = 32


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

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@torch.inference_mode()
def prefill(model: Any, tokens: int) -> Callable[[], None]:
    """The library's pass over a prompt of so many tokens, logits of the last one only, states kept."""
    prompt = (torch.arange(tokens, device="cuda") * 7 % 32_000)[None]

    def run() -> None:
        with torch.inference_mode():
            model(prompt, use_cache=True, logits_to_keep=1)

    return run
