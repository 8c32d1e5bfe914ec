"""`specla doctor`: what is here, and does it work."""

import hashlib
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import typer

from specla.client.cli.exits import FAILED
from specla.client.default_target import default_target
from specla.client.logs import configure_logs
from specla.rpc.errors import SpeclaError

_PACKAGES = ("specla", "torch", "triton", "numba", "safetensors", "tokenizers", "numpy", "grpcio", "protobuf")
_SELF_TEST_TOKENS = 8


def doctor(target: str | None, device: str) -> None:
    """Print what is found, one fact a line, and generate a few tokens.

    Raises:
        InvalidRequestError: no such device.
        typer.Exit: status 1 if no text could be generated.
    """
    from specla.verifier_service.config import VerifierConfig

    VerifierConfig(device=device)  # type: ignore[arg-type]
    configure_logs("error")
    _say("python", f"{platform.python_version()} on {platform.platform(terse=True)}")
    for package in _PACKAGES:
        _say(package, _version(package))
    _devices()
    folder = Path(target) if target is not None else default_target()
    ok = _model(folder)
    if ok and not _self_test(folder, device):
        ok = False
    typer.echo("ready to generate" if ok else "cannot generate on this machine; see above")
    if not ok:
        raise typer.Exit(FAILED)


def _say(name: str, what: str) -> None:
    typer.echo(f"{name + ':':<13} {what}")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _devices() -> None:
    try:
        import torch
    except ModuleNotFoundError:
        _say("device", "none: torch is not installed; the extra [verifier] brings it: see README.md")
        return
    _say("cpu", f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads")
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            _say("cuda", f"{torch.cuda.get_device_name(i)}, {torch.cuda.mem_get_info(i)[1] >> 20} MiB")
    else:
        _say("cuda", "none found, or this build of torch has none")


def _model(folder: Path) -> bool:
    from specla.verifier_service.targets.config import check_folder

    try:
        check_folder(folder)
    except SpeclaError as error:
        _say("model", str(error))
        return False
    weights = sorted(folder.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in weights)
    digest = hashlib.sha256()
    for path in weights:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    _say("model", f"{folder}, {size / 1e6:.1f} MB, SHA-256 {digest.hexdigest()[:16]}")
    return True


def _self_test(folder: Path, device: str) -> bool:
    try:
        from specla.client.local import Local

        begun = time.perf_counter()
        with Local(folder, device=device) as local:
            loaded = time.perf_counter()
            info = local.model()
            result = local.generate("The", max_tokens=_SELF_TEST_TOKENS, temperature=0.0, ignore_eos=True)
            done = time.perf_counter()
    except ModuleNotFoundError as error:
        _say("self-test", f"failed: {error.name} is not installed")
        return False
    except SpeclaError as error:
        _say("self-test", f"failed: {error}")
        return False
    _say("numerics", info.numerics_id)
    _say("drafters", ", ".join(info.drafters))
    _say(
        "self-test",
        f"{result.usage.completion_tokens} tokens in {1000 * (done - loaded):.0f} ms, loaded in {loaded - begun:.1f} s",
    )
    return True
