"""`specla train target`: the training loop, resumable at any step."""

import json
import time
from dataclasses import asdict
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the field's name for it)

from specla.training.target.batches import Batches, validation_rows
from specla.training.target.checkpoint import export, load_checkpoint, save_checkpoint
from specla.training.target.config import TrainConfig
from specla.training.target.curve import draw_curve
from specla.training.target.decode import END_OF_TEXT_ID
from specla.training.target.model import TargetModel, boundaries

UNDECAYED = ("A_log", "dt_bias")


class Trainer:
    """One run: model, optimiser, batches and the step they stand at."""

    def __init__(self, config: TrainConfig, data: Path, out: Path, device: torch.device) -> None:
        self.config, self.data, self.out, self.device = config, data, out, device
        torch.manual_seed(config.seed)
        torch.set_float32_matmul_precision("high")
        self.model = TargetModel(config.shape).to(device)
        if config.compile:
            for block in self.model.model.layers:
                block.compile()
        self.head_loss = torch.compile(head_loss) if config.compile else head_loss
        self.optimizer = make_optimizer(self.model, config)
        self.batches = Batches(
            data / "tokens",
            config.mix,
            batch=config.batch,
            length=config.length,
            steps=config.steps,
            seed=config.seed,
            device=device,
        )
        self.step, self.history = load_checkpoint(out, self.model, self.optimizer, config)

    def run(self, seconds: float | None = None) -> bool:
        """Train until the end or for about so many seconds; returns whether the run is complete.

        A checkpoint is written every `save_every_seconds` and on leaving, the model and its loss curve on leaving.
        """
        before = max((entry.get("seconds", 0.0) for entry in self.history), default=0.0)
        started = saved = time.monotonic()
        losses: list[Tensor] = []
        tokens = self.config.batch * self.config.length
        with _progress() as progress:
            bar = progress.add_task("training", total=self.config.steps, completed=self.step, note="")
            while self.step < self.config.steps:
                losses.append(self.train_step())
                self.step += 1
                if self.step % self.config.validate_every == 0 or self.step == self.config.steps:
                    self._validate()
                if self.step % 50 == 0 or self.step == self.config.steps:
                    loss = torch.stack(losses).mean().item()
                    losses.clear()
                    self.history.append(
                        {"tokens": self.step * tokens, "loss": loss, "seconds": before + time.monotonic() - started}
                    )
                    progress.update(bar, completed=self.step, note=f"loss {loss:.3f}")
                now = time.monotonic()
                if seconds is not None and now - started > seconds:
                    break
                if now - saved > self.config.save_every_seconds:
                    self.save()
                    saved = time.monotonic()
        self.save()
        self.export()
        return self.step == self.config.steps

    def train_step(self) -> Tensor:
        """One optimiser step; returns its mean loss in nats a token, still on the device."""
        inputs, targets = self.batches(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.rate(self.step)
        self.model.train()
        loss = self.loss(inputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy in nats a token; bfloat16 products, float32 sums."""
        where = boundaries(inputs, END_OF_TEXT_ID, self.config.shape.conv_size) if self.config.reset else None
        with torch.autocast(self.device.type, torch.bfloat16):
            features = self.model.model(inputs, where)
            loss: Tensor = self.head_loss(features, self.model.lm_head.weight, targets)
        return loss

    def _validate(self) -> None:
        # Gradients stay switched on and rows come by the batch: either would have the blocks compiled once more.
        entry: dict[str, float] = {"tokens": float(self.step * self.config.batch * self.config.length)}
        for domain, share in self.config.mix.items():
            if share > 0:
                rows = validation_rows(
                    self.data / "tokens",
                    domain,
                    length=self.config.length,
                    rows=self.config.batch,
                    device=self.device,
                )
                entry[f"validation_{domain}"] = self.loss(rows[:, :-1], rows[:, 1:]).item()
        self.history.append(entry)

    def save(self) -> None:
        """Write the checkpoint."""
        save_checkpoint(self.out, self.model, self.optimizer, self.history, self.step, self.config)

    def export(self) -> None:
        """Write the model as it stands in Hugging Face format, the loss curve, and a record of the run."""
        cuda = self.device.type == "cuda"
        record = {
            "config": asdict(self.config),
            "device": torch.cuda.get_device_name(self.device) if cuda else "CPU",
            "torch": torch.__version__,
            "tokens_seen": self.step * self.config.batch * self.config.length,
            "distinct_tokens": self.batches.distinct,
            "history": self.history,
        }
        (self.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
        export(self.model, self.data / "tokenizer", self.out / "model")
        draw_curve(self.history, self.out / "loss.svg")


def head_loss(features: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats of `[B, T, hidden]` features under a `[vocabulary, hidden]` head."""
    return F.cross_entropy(F.linear(features, head).flatten(0, 1).float(), targets.flatten())


def make_optimizer(model: TargetModel, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW; norms, decay rates, time-step biases and convolution taps are not decayed."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        matrix = parameter.ndim == 2 and not name.endswith(UNDECAYED)
        (decayed if matrix else plain).append(parameter)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=True)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
    )
