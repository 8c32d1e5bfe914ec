"""Everything a verifier can be told, in one frozen record; flags and file keys are its fields."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specla.rpc.errors import InvalidRequestError
from specla.rpc.settings import ServingConfig, check_address

_CPU_CHUNK, _GPU_CHUNK = 128, 2048
MAX_ROWS = 129  # the root and 128 candidates: the most that one session's part of a pass may have
SHIPPED_TARGET = Path(__file__).resolve().parent.parent / "models"


@dataclass(frozen=True, kw_only=True)
class VerifierConfig(ServingConfig):
    """A verifier's settings; where it listens is inherited.

    Engine:
        target: folder of the checkpoint (config.json, *.safetensors, tokenizer.json).
        device: "cpu"; "cuda", an NVIDIA GPU of compute capability 9.0 or later (needs Triton); or "auto", the CPU: a
            GPU is used where it is asked for.
        dtype: numbers of weights and activations: "auto", the checkpoint's own on a GPU and float32 on the CPU, which
            runs no others; "bfloat16", "float16" or "float32".
        numerics: "exact", a token's bits do not depend on what else is in the pass, or "fast".
        cpu_kernels: on a CPU, what runs between the matrix products: "compiled" by numba, or "torch" operations, about
            half as fast. Their bits differ.
        threads: threads of one operation, set for the whole process; 0 for PyTorch's own choice (OMP_NUM_THREADS,
            else the cores), at most 8. On cores that other work keeps busy, 1 is by far the fastest.
        max_sessions: slots, each with its state; fewer if `memory_mib` is less than they take.
        memory_mib: limit in MiB: on a CPU on the sessions' memory, 0 is none; on a GPU on all that is held there, the
            weights included, 0 is nine tenths of what is free.
        max_rows: rows of one session in one pass, root included; below 64 part of numerics on a GPU.
        max_prompt_tokens: tokens of one prompt.
        max_new_tokens: tokens of one completion, and the default where a request sets none.
        prefill_chunk: tokens of one piece of prefill, 0 for 128 on a CPU and 2048 on a GPU; part of numerics, so the
            same on verifiers that recover each other's sessions.

    Scheduler:
        max_batch_rows: rows of all sessions in one pass; candidates beyond it are left out.
        drafting: "measured", only candidates that pay are verified and only drafters that pay are asked, or
            "unconditional", all that fit, whatever they cost: to prove that drafts never change a text.
        max_draft_wait_s: longest a session may wait for a drafter's next draft, seconds.
        idle_timeout_s: a session that stands still for so long at its credit is ended, seconds.
        advertised_address: where drafters reach this verifier, `host:port`; empty: where it listens.
    """

    target: Path = SHIPPED_TARGET
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    numerics: Literal["exact", "fast"] = "exact"
    cpu_kernels: Literal["compiled", "torch"] = "compiled"
    threads: int = 0
    max_sessions: int = 16
    memory_mib: int = 0
    max_rows: int = 65
    max_prompt_tokens: int = 32768
    max_new_tokens: int = 4096
    prefill_chunk: int = 0
    max_batch_rows: int = 256
    drafting: Literal["measured", "unconditional"] = "measured"
    max_draft_wait_s: float = 0.05
    idle_timeout_s: float = 600.0
    advertised_address: str = ""

    def __post_init__(self) -> None:
        """Refuse what cannot be served.

        Raises:
            InvalidRequestError: names the field, what it holds and what it may hold.
        """
        self.check_serving()
        object.__setattr__(self, "target", Path(self.target))
        _one_of("device", self.device, ("auto", "cpu", "cuda"))
        _one_of("dtype", self.dtype, ("auto", "bfloat16", "float16", "float32"))
        _one_of("numerics", self.numerics, ("exact", "fast"))
        _one_of("cpu_kernels", self.cpu_kernels, ("compiled", "torch"))
        _one_of("drafting", self.drafting, ("measured", "unconditional"))
        _within("threads", self.threads, 0, 1024)
        _within("max_sessions", self.max_sessions, 1, 65536)
        _within("memory_mib", self.memory_mib, 0, 1 << 30)
        _within("max_rows", self.max_rows, 1, MAX_ROWS)
        _within("max_prompt_tokens", self.max_prompt_tokens, 1, 1 << 31)
        _within("max_new_tokens", self.max_new_tokens, 1, 1 << 31)
        if self.prefill_chunk:
            _within("prefill_chunk", self.prefill_chunk, 16, 8192)
        _within("max_batch_rows", self.max_batch_rows, 1, 1 << 20)
        _seconds("max_draft_wait_s", self.max_draft_wait_s, 10.0)
        _seconds("idle_timeout_s", self.idle_timeout_s, 1e6)
        if self.advertised_address:
            check_address("advertised_address", self.advertised_address)
        if self.prefill_chunk % 16:
            raise InvalidRequestError(
                "prefill_chunk", f"prefill_chunk is {self.prefill_chunk}", hint="Give a multiple of 16"
            )

    @property
    def chunk_tokens(self) -> int:
        """Tokens of one piece of prefill, whatever was left open."""
        return self.prefill_chunk or (_GPU_CHUNK if self.device == "cuda" else _CPU_CHUNK)


def _one_of(name: str, value: str, allowed: Collection[str]) -> None:
    if value not in allowed:
        raise InvalidRequestError(name, f"{name} is {value!r}", hint=f"Give one of {', '.join(sorted(allowed))}")


def _within(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidRequestError(name, f"{name} is {value!r}", hint=f"Give an integer from {low} to {high}")


def _seconds(name: str, value: float, high: float) -> None:
    if not 0 <= value <= high:  # written so that NaN is refused too
        raise InvalidRequestError(name, f"{name} is {value!r}", hint=f"Give 0 to {high:g} seconds")
