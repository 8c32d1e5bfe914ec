"""Runs the services of deploy/compose.yaml as local processes: their own commands, environments and health checks.

Only what containers would supply is put in place: service names become loopback addresses, ports become free
ones. Images that carry no torch run where torch cannot be imported.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from product_tree import ROOT

COMPOSE = ROOT / "deploy/compose.yaml"
ENV_EXAMPLE = ROOT / "deploy/.env.example"
_START_S = 120.0
_STOP_S = 30.0


def read_env(path: Path = ENV_EXAMPLE) -> dict[str, str]:
    """The settings of an env file."""
    lines = (line.strip() for line in path.read_text().splitlines())
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def interpolate(text: str, env: dict[str, str]) -> str:
    """Put ${NAME:-default} in place; KeyError for a name without default that `env` lacks."""

    def value(match: re.Match[str]) -> str:
        name, default = match.group(1), match.group(2)
        return env[name] if default is None else env.get(name) or default

    return re.sub(r"\$\{(\w+)(?::-([^}]*))?\}", value, text)


def read_services(env: dict[str, str]) -> dict[str, dict[str, Any]]:
    """The services of compose.yaml with `env` put in place."""
    return dict(yaml.safe_load(interpolate(COMPOSE.read_text(), env))["services"])


class Composed:
    """The services of compose.yaml as processes of this machine.

    Args:
        scratch: a folder for logs.
        env: what would stand in deploy/.env, beyond .env.example.
    """

    def __init__(self, scratch: Path, env: dict[str, str]) -> None:
        self.services = read_services(read_env() | env)
        self.ports = {name: _free_port() for name in self.services}
        self._scratch = scratch
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._no_torch = scratch / "no_torch"
        self._no_torch.mkdir()
        (self._no_torch / "torch.py").write_text("raise ImportError('this image carries no torch')\n")

    def __enter__(self) -> "Composed":
        try:
            self.start_all()
        except BaseException:
            self.stop_all()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_all()

    def address(self, service: str) -> str:
        return f"127.0.0.1:{self.ports[service]}"

    def start_all(self) -> None:
        """Start each service once those it depends on are healthy, and wait until all are."""
        waiting = dict(self.services)
        while waiting:
            ready = [name for name, spec in waiting.items() if not set(spec.get("depends_on", ())) & waiting.keys()]
            assert ready, f"these wait for each other: {sorted(waiting)}"
            for name in ready:
                self.start(name)
            for name in ready:
                self.wait_healthy(name)
                del waiting[name]

    def start(self, service: str) -> None:
        spec = self.services[service]
        env = os.environ | {name: str(value) for name, value in spec.get("environment", {}).items()}
        env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
        if spec["build"]["target"] == "light":
            env["PYTHONPATH"] = str(self._no_torch)
        with self.log(service).open("ab") as log:
            self._processes[service] = subprocess.Popen(
                ["specla", *map(self._placed, spec["command"])],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._scratch,
            )

    def wait_healthy(self, service: str) -> None:
        """Run the service's own health check until it passes."""
        begun = time.monotonic()
        while self.check_health(service).returncode != 0:
            code = self._processes[service].poll()
            assert code is None, f"{service} ended with status {code}:\n{self.log(service).read_text()}"
            assert time.monotonic() - begun < _START_S, f"{service} is not healthy:\n{self.log(service).read_text()}"
            time.sleep(0.1)

    def check_health(self, service: str) -> subprocess.CompletedProcess[str]:
        kind, *command = self.services[service]["healthcheck"]["test"]
        assert kind == "CMD"
        command[0] = str(Path(sys.executable).parent / command[0])
        own = [part.replace(f"127.0.0.1:{self._port_inside(service)}", self.address(service)) for part in command]
        return subprocess.run(own, capture_output=True, text=True, timeout=_START_S)

    def stop(self, service: str, how: int = signal.SIGTERM) -> int:
        """Signal the service and return its exit status."""
        process = self._processes.pop(service)
        process.send_signal(how)
        try:
            return process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise

    def stop_all(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()

    def log(self, service: str) -> Path:
        return self._scratch / f"{service}.log"

    def _port_inside(self, service: str) -> int:
        (port,) = (part.split("=")[1] for part in self.services[service]["command"] if part.startswith("--port="))
        return int(port)

    def _placed(self, argument: str) -> str:
        for name in self.services:
            argument = argument.replace(f"={name}:{self._port_inside(name)}", f"={self.address(name)}")
            argument = re.sub(rf"^--port={self._port_inside(name)}$", f"--port={self.ports[name]}", argument)
        return argument.replace("--host=0.0.0.0", "--host=127.0.0.1")


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
