"""Targets: what is loaded, what is refused, and the forward passes against the float64 model."""

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from generations import random_prompt
from reference_model import ReferenceModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from specla.kernels.topology import Topology
from specla.kernels.tree import pack
from specla.rpc.errors import InvalidRequestError, UnsupportedModelError
from specla.verifier_service.config import VerifierConfig
from specla.verifier_service.memory import MIB
from specla.verifier_service.state import StateStore
from specla.verifier_service.target import check_memory_limit
from specla.verifier_service.targets.config import GatedDeltaNetConfig
from specla.verifier_service.targets.gated_deltanet import Kernels, Mode, prefill_chunk, prepare
from specla.verifier_service.targets.tree_pass import tree_pass
from specla.verifier_service.targets.weights import expected_shapes, load_checkpoint

VOCAB = 320
NAN, INF = float("nan"), float("inf")
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped values": {"v_heads": 4, "expand_v": 2.0},
    "no gate, untied": {"gate": False, "tied": False, "layers": 3},
    "negative eigenvalues, odd widths": {"hidden": 48, "neg_eigval": True, "heads": 3, "expand_v": 3.0},
}


def rms_ratio(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


@pytest.mark.parametrize("kernels", ["compiled", "torch"])
@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logits_against_float64(
    tiny_target_of: Callable[..., Path], shape: dict[str, Any], mode: Mode, kernels: Kernels
) -> None:
    """Prefill in two chunks, then two sessions' trees in one pass, against one float64 tree from the empty state."""
    folder = tiny_target_of(**shape)
    config = GatedDeltaNetConfig.from_folder(folder)
    weights = prepare(config, load_checkpoint(folder, config).tensors, mode, kernels)
    store = StateStore(config, 2)
    wire = [[-1, 0, 0, 1, 3, -1, 5], [-1, 0, 1, 2]]
    prompts = [random_prompt(VOCAB, 90, 1), random_prompt(VOCAB, 2, 2)]
    drafts = [random_prompt(VOCAB, len(parents), 3) for parents in wire]
    for slot, prompt in enumerate(prompts):
        for start in range(0, len(prompt) - 1, 64):
            tokens = torch.tensor(prompt[start : min(start + 64, len(prompt) - 1)])
            prefill_chunk(weights, tokens, store.recurrent_state[slot], store.conv_state[slot], False)
    before = store.recurrent_state.clone(), store.conv_state.clone()
    batch = pack([Topology.from_wire(parents) for parents in wire])
    rows = [token for prompt, draft in zip(prompts, drafts, strict=True) for token in (prompt[-1], *draft)]
    out = tree_pass(weights, torch.tensor(rows), batch, store.recurrent_state, store.conv_state, [0, 1])
    assert torch.equal(before[0], store.recurrent_state)
    assert torch.equal(before[1], store.conv_state)
    assert out.logits is not None
    reference = ReferenceModel(folder)
    for session, (prompt, draft, parents) in enumerate(zip(prompts, drafts, wire, strict=True)):
        last = len(prompt) - 1
        tree = [*range(-1, last), *(last + 1 + p if p >= 0 else last for p in parents)]
        wanted = reference.logits([*prompt, *draft], tree)[last:]
        found = out.logits[batch.offsets[session] : batch.offsets[session + 1]]
        assert rms_ratio(found, wanted) < 1e-5


def test_half_precision_and_shards_load_as_one(tiny_target: Path, tmp_path: Path) -> None:
    tensors = {name: x.bfloat16() for name, x in load_file(tiny_target / "model.safetensors").items()}
    whole, sharded = tmp_path / "whole", tmp_path / "sharded"
    for folder in (whole, sharded):
        shutil.copytree(tiny_target, folder)
    save_file(tensors, whole / "model.safetensors")
    (sharded / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, sharded / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    config = GatedDeltaNetConfig.from_folder(whole)
    one, other = load_checkpoint(whole, config), load_checkpoint(sharded, config)
    assert one.tensors.keys() == other.tensors.keys()
    assert all(torch.equal(x, other.tensors[name]) for name, x in one.tensors.items())
    assert all(x.dtype == torch.bfloat16 for x in one.tensors.values())
    assert one.digest != load_checkpoint(tiny_target, config).digest


@pytest.mark.parametrize(
    ("change", "found", "supported"),
    [
        ({"model_type": "llama"}, "llama", "gated_deltanet"),
        ({"attn": {"layers": [1]}}, "attn", "None"),
        ({"hidden_act": "powlu"}, "powlu", "swish"),
        ({"use_short_conv": False}, "use_short_conv", "True"),
        ({"head_dim": 24}, "24", "multiple of 16"),
        ({"num_v_heads": 3}, "3", "multiple of num_heads"),
        ({"expand_v": 1.3}, "1.3", "multiple of 16"),
        ({"hidden_size": None}, "hidden_size", "hidden_size"),
        ({"hidden_size": "64"}, "'64'", "positive integer"),
        ({"conv_size": 1}, "1", "2 or more"),
        ({"output_gate_activation": "relu"}, "relu", "swish"),
        ({"output_gate_activation": ["swish"]}, "swish", "sigmoid"),
        *[({"expand_v": v}, f"expand_v is {v!r}", "a number from 0") for v in ("x", NAN, INF, -INF, None, True, 1e300)],
        ({"expand_v": 0}, "expand_v is 0", "multiple of 16"),
        *[({"norm_eps": v}, f"norm_eps is {v!r}", "1e-12 to 1") for v in ("a", None, -1e-6, 0, 2, NAN, INF, [1])],
        *[({"hidden_ratio": v}, f"hidden_ratio is {v!r}", "a number from 0") for v in ("x", -1, NAN, INF, [4])],
        *[({"hidden_ratio": v, "intermediate_size": None}, "hidden_ratio is 0", "one channel") for v in (0, 0.0)],
        *[({"intermediate_size": v}, f"intermediate_size is {v!r}", "positive") for v in ("x", 0, True, 1.5)],
        *[({"num_v_heads": v}, f"num_v_heads is {v!r}", "positive integer") for v in ("2", 0, False)],
        *[({"tie_word_embeddings": v}, f"tie_word_embeddings is {v!r}", "true or false") for v in ("no", 1, None)],
        ({"use_gate": "yes"}, "use_gate is 'yes'", "true or false"),
        ({"allow_neg_eigval": 0}, "allow_neg_eigval is 0", "true or false"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000", "at most 4096"),
        ({"vocab_size": 10**400}, "vocab_size is 1000", "at most"),
        *[
            ({"eos_token_id": v}, "eos_token_id is ", "an id from 0 to 319")
            for v in ("x", "0", 5000, 320, -1, 1.0, True, [[1]], [0, "x"], {"id": 1}, NAN)
        ],
    ],
)
def test_configurations_that_are_refused(
    tiny_target: Path, change: dict[str, object], found: str, supported: str
) -> None:
    values = json.loads((tiny_target / "config.json").read_text())
    with pytest.raises(UnsupportedModelError) as error:
        GatedDeltaNetConfig.from_values(values | change)
    assert found in error.value.message
    assert supported in error.value.hint
    assert len(error.value.message) < 200


@pytest.mark.parametrize("eos", ["q", 5000, [[1]]])
def test_an_end_of_text_of_the_generation_config_is_checked_too(tiny_target: Path, tmp_path: Path, eos: object) -> None:
    shutil.copy(tiny_target / "config.json", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(UnsupportedModelError, match="eos_token_id is"):
        GatedDeltaNetConfig.from_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 319]}))
    assert GatedDeltaNetConfig.from_folder(tmp_path).eos_token_ids == (7, 319)


def test_defaults_are_those_of_the_class_that_writes_them() -> None:
    values = {
        "model_type": "gated_deltanet",
        "vocab_size": 32000,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_heads": 8,
        "head_dim": 256,
        "eos_token_id": 2,
    }
    config = GatedDeltaNetConfig.from_values(values)
    assert (config.value_heads, config.head_v_dim, config.mlp_dim) == (8, 512, 5632)
    assert (config.conv_size, config.use_gate, config.allow_neg_eigval) == (4, True, False)
    assert config.eos_token_ids == (2,)


def _without(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def _with_bias(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.attn.o_proj.bias"] = torch.zeros(64)


def _narrow(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.attn.A_log"] = torch.zeros(3)


def _integers(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int32)


def _other_head(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embeddings.weight"] + 1


def _nan(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.attn.o_proj.weight"][3, 5] = NAN


def _infinite(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.mlp_norm.weight"] = torch.full((64,), -INF, dtype=torch.bfloat16)


def _nan_head(tensors: dict[str, Tensor]) -> None:
    tensors["model.embeddings.weight"][0, 0] = NAN
    tensors["lm_head.weight"] = tensors["model.embeddings.weight"].clone()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_nan, "model.layers.1.attn.o_proj.weight holds NaN"),
        (_infinite, "model.layers.0.mlp_norm.weight holds infinite numbers"),
        (_nan_head, "lm_head.weight holds NaN"),
        (_without, r"1 of \d+ tensors are missing: model.layers.1.mlp.up_proj.weight"),
        (_with_bias, "1 tensors are unexpected: model.layers.0.attn.o_proj.bias"),
        (_narrow, r"A_log is \[3\]"),
        (_integers, "model.norm.weight is torch.int32"),
        (_other_head, "said to be tied"),
    ],
)
def test_checkpoints_that_are_refused(
    tiny_target: Path, tmp_path: Path, spoil: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    tensors = load_file(tiny_target / "model.safetensors")
    spoil(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=message) as error:
        load_checkpoint(tmp_path, GatedDeltaNetConfig.from_folder(tiny_target))
    assert error.value.hint


@pytest.mark.parametrize(("dtype", "least"), [("auto", 3), ("bfloat16", 3), ("float32", 5)])
def test_a_gpus_limit_below_the_weights_is_refused_by_their_shapes_alone(
    tiny_target: Path, dtype: Literal["auto", "bfloat16", "float32"], least: int
) -> None:
    model = replace(GatedDeltaNetConfig.from_folder(tiny_target), vocab_size=18_000)
    count = sum(math.prod(shape) for shape in expected_shapes(model).values())
    assert 2 * count / MIB < 3 < 4 * count / MIB < 5
    for mib in (least - 1, least, 0):
        config = VerifierConfig(target=tiny_target, device="cuda", dtype=dtype, memory_mib=mib)
        if mib == least - 1:
            with pytest.raises(InvalidRequestError, match=rf"{mib} MiB hold no session.*Give {least} MiB or") as error:
                check_memory_limit(config, model)
            assert error.value.field == "memory_mib"
        else:
            check_memory_limit(config, model)


def test_broken_files_are_refused(tiny_target: Path, tmp_path: Path) -> None:
    config = GatedDeltaNetConfig.from_folder(tiny_target)
    with pytest.raises(UnsupportedModelError, match="does not exist"):
        load_checkpoint(tmp_path, config)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(UnsupportedModelError, match="cannot be read"):
        load_checkpoint(tmp_path, config)
    with pytest.raises(InvalidRequestError, match=r"lacks config\.json"):
        GatedDeltaNetConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnsupportedModelError, match="not JSON"):
        GatedDeltaNetConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(UnsupportedModelError, match="not JSON"):
        GatedDeltaNetConfig.from_folder(tmp_path)


def test_the_largest_finite_weights_are_not_taken_for_infinite_ones(tiny_target: Path, tmp_path: Path) -> None:
    tensors = load_file(tiny_target / "model.safetensors")
    name, extremes = "model.norm.weight", torch.finfo(torch.float16)
    tensors[name] = torch.tensor([extremes.min, extremes.max] * 32, dtype=torch.float16)
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = load_checkpoint(tmp_path, GatedDeltaNetConfig.from_folder(tiny_target))
    assert torch.equal(checkpoint.tensors[name], tensors[name])


@pytest.mark.parametrize("files", [{"a": 5}, {"a": None}, {"a": "x.safetensors", "b": 5}, {"a": ["x"]}, 5, ["x"]])
def test_an_index_that_names_no_files_is_refused(tiny_target: Path, tmp_path: Path, files: object) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    with pytest.raises(UnsupportedModelError, match="weight_map") as error:
        load_checkpoint(tmp_path, GatedDeltaNetConfig.from_folder(tiny_target))
    assert error.value.hint


def test_a_tied_checkpoint_may_hold_its_head_twice(tiny_target: Path, tmp_path: Path) -> None:
    tensors = load_file(tiny_target / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embeddings.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = load_checkpoint(tmp_path, GatedDeltaNetConfig.from_folder(tiny_target))
    assert "lm_head.weight" not in checkpoint.tensors


def test_the_torch_form_runs_without_numba(tiny_target: Path) -> None:
    program = (
        "import sys\n"
        "sys.modules['numba'] = None\n"
        "from specla.client import Local\n"
        "from specla.verifier_service.config import VerifierConfig\n"
        "with Local(verifier=VerifierConfig(target=sys.argv[1], cpu_kernels='torch', threads=1)) as local:\n"
        "    print(len(local.generate('a', max_tokens=4, ignore_eos=True).token_ids))\n"
    )
    command = [sys.executable, "-c", program, str(tiny_target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr
