"""Tests as another user of the host, who sees this code and what it needs at a place that is open to everybody."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sandbox.jail.interpreter import ask_interpreter
from sandbox.settings import JailSettings


def report_from_elsewhere(
    command: Callable[[Path, list[str]], list[str]], timeout_s: float
) -> dict[str, Any]:
    """Run a command in a mount namespace of its own; its last line is what it reports, as JSON.

    `command` is asked with the folder, below which `runtime` is that of programs, and with the beginning of a command
    line that runs Python code.
    """
    mounts = {
        "repository": Path(__file__).parents[3],
        "packages": Path(sysconfig.get_path("purelib")),
        "runtime": JailSettings().runtime,
        "python": Path(sys.base_prefix),
    }
    python_name = ask_interpreter(Path(sys.executable)).executable.name
    with tempfile.TemporaryDirectory(prefix="elsewhere-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        steps = ["mount --make-rprivate /"]
        for mount, source in mounts.items():
            (folder / mount).mkdir()
            steps.append(f"mount --bind '{source}' {folder / mount}")
        python = [f"{folder}/python/bin/{python_name}", "-s", "-B", "-c"]
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", " && ".join([*steps, 'exec "$@"']), "sh", *command(folder, python)],
            capture_output=True,
            text=True,
            env={
                "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
                "PYTHONPATH": f"{folder}/repository:{folder}/packages",
                "LD_LIBRARY_PATH": f"{folder}/python/lib",
            },
            timeout=timeout_s,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]
