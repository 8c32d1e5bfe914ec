"""A tiny random Gated DeltaNet checkpoint with a byte-level tokenizer, in the files and names that fla writes.

It writes nonsense, quickly: what a test of the machinery needs. The weights are scaled so that greedy
text wanders instead of repeating one token.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"

# Enough text for some three hundred merges; it holds prose, code, digits and characters of several bytes.
_SAMPLE = """
The river ran past the mill and under the bridge, and in the morning the miller's daughter went down to the water
to see whether the ice had gone. It had not gone, but it had grown thin; she could hear the water running under it.
"Then we shall have the wheel turning before the week is out," she said, and went in to tell her father.
def total(values: list[int]) -> int:
    result = 0
    for value in values:
        if value > 0:
            result += value
    return result


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self, value: int) -> None:
        self.count = self.count + value
        print(f"count is now {self.count}")
Question: Tom has 12 apples and gives 5 to Ann. How many apples has he left? Answer: 12 - 5 = 7. He has 7 apples left.
Question: A train runs 60 miles in 2 hours. How many miles does it run in one hour? Answer: 60 / 2 = 30 miles.
Größe, café, naïve, Ελλάδα, 日本語, 😀 🚀 – “quoted”.
"""


def make_tiny_target(
    path: Path,
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 2,
    v_heads: int | None = None,
    head_dim: int = 16,
    expand_v: float = 1.0,
    gate: bool = True,
    neg_eigval: bool = False,
    tied: bool = True,
    vocab: int = 320,
    seed: int = 0,
) -> Path:
    """Write config.json, model.safetensors (float32), tokenizer.json and generation_config.json into `path`.

    Args:
        path: the folder, made if it does not exist.
        hidden, layers, heads, v_heads, head_dim, expand_v: the shape, as in fla's configuration.
        gate: whether the output of a layer is gated (`use_gate`).
        neg_eigval: whether beta reaches 2 (`allow_neg_eigval`).
        tied: whether the head shares the embedding's weights.
        vocab: tokens of model and tokenizer, 257 or more.
        seed: of the weights; the tokenizer does not depend on it.

    Returns:
        `path`.
    """
    path.mkdir(parents=True, exist_ok=True)
    value_heads = heads if v_heads is None else v_heads
    intermediate = 2 * hidden
    config = {
        "architectures": ["GatedDeltaNetForCausalLM"],
        "model_type": "gated_deltanet",
        "attn": None,
        "attn_mode": "chunk",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_heads": heads,
        "num_v_heads": v_heads,
        "head_dim": head_dim,
        "expand_v": expand_v,
        "use_gate": gate,
        "use_short_conv": True,
        "conv_size": 4,
        "allow_neg_eigval": neg_eigval,
        "intermediate_size": intermediate,
        "hidden_ratio": None,
        "hidden_act": "swish",
        "norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": None,
        "torch_dtype": "float32",
    }
    weights = _weights(
        np.random.default_rng(seed),
        hidden=hidden,
        layers=layers,
        intermediate=intermediate,
        key_dim=heads * head_dim,
        value_heads=value_heads,
        head_v_dim=int(head_dim * expand_v),
        gate=gate,
        tied=tied,
        vocab=vocab,
    )
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (path / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 0}) + "\n")
    save_file(weights, str(path / "model.safetensors"), metadata={"format": "pt"})
    make_tiny_tokenizer(vocab).save(str(path / "tokenizer.json"))
    return path


def make_tiny_tokenizer(vocab: int = 320) -> Tokenizer:
    """A byte-level BPE tokenizer of exactly `vocab` tokens; any text survives encode and decode; id 0 ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=1,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SAMPLE.splitlines(keepends=True), trainer=trainer)
    if tokenizer.get_vocab_size() != vocab:
        raise ValueError(f"the sample text gives {tokenizer.get_vocab_size()} tokens, not {vocab}: ask for fewer")
    return tokenizer


def _weights(
    rng: np.random.Generator,
    *,
    hidden: int,
    layers: int,
    intermediate: int,
    key_dim: int,
    value_heads: int,
    head_v_dim: int,
    gate: bool,
    tied: bool,
    vocab: int,
) -> dict[str, np.ndarray]:
    value_dim = value_heads * head_v_dim

    def normal(*shape: int, std: float | None = None) -> np.ndarray:
        std = shape[-1] ** -0.5 if std is None else std
        return (rng.standard_normal(shape) * std).astype(np.float32)

    def around_one(size: int) -> np.ndarray:
        return (1.0 + 0.1 * rng.standard_normal(size)).astype(np.float32)

    # A small embedding under large layer outputs: the head then follows the state, not the last token.
    weights = {"model.embeddings.weight": normal(vocab, hidden, std=2.0 * hidden**-0.5)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.attn_norm.weight": around_one(hidden),
            f"{prefix}.attn.q_proj.weight": normal(key_dim, hidden),
            f"{prefix}.attn.k_proj.weight": normal(key_dim, hidden),
            f"{prefix}.attn.v_proj.weight": normal(value_dim, hidden),
            f"{prefix}.attn.a_proj.weight": normal(value_heads, hidden),
            f"{prefix}.attn.b_proj.weight": normal(value_heads, hidden),
            f"{prefix}.attn.A_log": np.log(rng.uniform(0.5, 8.0, value_heads)).astype(np.float32),
            # exp(g) lies between 0.6 and 0.999 or so: some heads forget fast, some slowly.
            f"{prefix}.attn.dt_bias": rng.uniform(-6.0, -2.5, value_heads).astype(np.float32),
            f"{prefix}.attn.q_conv1d.weight": normal(key_dim, 1, 4, std=0.6),
            f"{prefix}.attn.k_conv1d.weight": normal(key_dim, 1, 4, std=0.6),
            f"{prefix}.attn.v_conv1d.weight": normal(value_dim, 1, 4, std=0.6),
            f"{prefix}.attn.o_norm.weight": around_one(head_v_dim),
            f"{prefix}.attn.o_proj.weight": normal(hidden, value_dim, std=2.0 * value_dim**-0.5),
            f"{prefix}.mlp_norm.weight": around_one(hidden),
            f"{prefix}.mlp.gate_proj.weight": normal(intermediate, hidden),
            f"{prefix}.mlp.up_proj.weight": normal(intermediate, hidden),
            f"{prefix}.mlp.down_proj.weight": normal(hidden, intermediate, std=2.0 * intermediate**-0.5),
        }
        if gate:
            weights[f"{prefix}.attn.g_proj.weight"] = normal(value_dim, hidden)
    weights["model.norm.weight"] = around_one(hidden)
    if not tied:
        weights["lm_head.weight"] = normal(vocab, hidden, std=2.0 * hidden**-0.5)
    return weights
