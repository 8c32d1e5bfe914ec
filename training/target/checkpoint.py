"""Files of a run: resumable checkpoints, and the model in fla's Hugging Face format."""

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from specla.training.target.config import TargetShape, TrainConfig
from specla.training.target.model import TargetModel

CHECKPOINT = "checkpoint.pt"
FREE = ("tokens", "save_every_seconds", "validate_every", "compile")  # what a resumed run may change
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


class ResumeError(ValueError):
    """A checkpoint that does not belong to the run that would go on from it."""


def save_checkpoint(
    folder: Path, model: TargetModel, optimizer: torch.optim.Optimizer, history: list[dict[str, float]], step: int,
    config: TrainConfig,
) -> None:  # fmt: skip
    """Write everything that going on needs, at once: a kill leaves the old file or the new one."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "history": history,
        "config": json.dumps(asdict(config), sort_keys=True),
    }
    partial = folder / f"{CHECKPOINT}.partial"
    torch.save(state, partial)
    os.replace(partial, folder / CHECKPOINT)


def load_checkpoint(
    folder: Path, model: TargetModel, optimizer: torch.optim.Optimizer, config: TrainConfig
) -> tuple[int, list[dict[str, float]]]:
    """Restore a run; returns the next step and the history, (0, []) where there is no checkpoint.

    Raises:
        ResumeError: the checkpoint was written with other settings. The number of tokens may change while the rate
            has not begun to fall.
    """
    path = folder / CHECKPOINT
    if not path.exists():
        return 0, []
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    written, wanted = json.loads(state["config"]), json.loads(json.dumps(asdict(config)))
    if changed := sorted(key for key in wanted if key not in FREE and written.get(key) != wanted[key]):
        raise ResumeError(f"{path} was written with other settings for {', '.join(changed)}; use another --out")
    level = (1 - config.decay) * min(written["tokens"], wanted["tokens"]) / (config.batch * config.length)
    if written["tokens"] != wanted["tokens"] and state["step"] > level:
        raise ResumeError(f"{path} stands at step {state['step']}, where the rate falls; its tokens are settled")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"], state["history"]


def export(model: TargetModel, tokenizer: Path, out: Path) -> None:
    """Write config.json, model.safetensors (bfloat16, the tied head left out), tokenizer and generation_config.json."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(model.shape.to_json(), indent=2) + "\n")
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # save_file leaves it readable by its owner alone
    generation = {"eos_token_id": 0, "do_sample": False}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    for name in TOKENIZER_FILES:
        if (tokenizer / name).resolve() != (out / name).resolve():
            shutil.copy(tokenizer / name, out / name)


def load_model(folder: Path) -> TargetModel:
    """A model that `export` wrote, in float32."""
    shape = TargetShape.from_json(json.loads((folder / "config.json").read_text()))
    model = TargetModel(shape)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embeddings.weight"]
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return model
