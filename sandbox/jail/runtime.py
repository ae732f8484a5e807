"""The runtime environment: the root file system that programs see inside the jail, built by one command.

    <path>/root           the jail's /
    <path>/manifest.json  which parts of root are complete, and from what they were made
    <path>/lock           held while somebody builds

The folder is the runtime's own: what else is in it when the first build begins stops that build, for a later one
removes what it replaces.

Three parts are built and replaced one by one: `base` (interpreter, tools, libraries, /etc), `packages`
(/python/site, from packages.txt) and `jail` (/jail: forkserver, fork helper, init). Each part is made beside
root and moved in when it is whole; the manifest names a part only after that, and forgets it before a new one
is moved in. So a build that dies anywhere is never taken for complete, and the next one continues after the
last whole part. Files are replaced, never written into: a jail that still runs keeps what it has open.

Packages come as wheels only and are copied, never run, outside the jail. pip installs them, not uv: uv links
files from its cache, and the jail must share no inode with the host.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from pydantic import BaseModel, ValidationError

from sandbox.errors import ConfigError
from sandbox.jail import rootfs
from sandbox.jail.interpreter import Interpreter, ask_interpreter, choose_interpreter
from sandbox.jail.libraries import binaries_below, copy_libraries

#: Raise this when this file or rootfs.py builds something else from the same inputs.
LAYOUT = 1

_HERE = Path(__file__).parent
PACKAGES = _HERE / "packages.txt"
#: No libc, no start files, no stack protector (it lives in libc), and no padding: one page, quick to exec.
_BARE = [
    *("-Os", "-static", "-nostdlib", "-ffreestanding", "-fno-stack-protector"),
    *("-fno-asynchronous-unwind-tables", "-s", "-Wl,--build-id=none,-z,noseparate-code"),
]
#: What each file of /jail is made of: the C compiler's flags, or None for a plain copy.
_JAIL_FILES: dict[str, tuple[str, list[str] | None]] = {
    "forkserver.py": ("forkserver.py", None),
    "roc_harness.py": ("../grading/harness.py", None),
    "libfork.so": ("fork.c", ["-O2", "-fPIC", "-shared"]),
    "libheap.so": ("heap.c", ["-O2", "-fPIC", "-shared"]),
    "init": ("init.c", _BARE),
    "guardian": ("guardian.c", _BARE),
}
#: Read by CPython at its start; they would mix our environment into the interpreter that pip installs for.
_PYTHONS_OWN = {"PYTHONPATH", "PYTHONHOME"}
COMPILERS = ("cc", "gcc", "clang")
#: Said of a runtime with an interpreter that is not preferred.
ADVICE = "with Python 3.13 or 3.12 on this host a call would be cheaper"
_C_WARNINGS = ["-Wall", "-Wextra", "-Werror"]

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Runtime:
    """A complete runtime environment."""

    root: Path
    python_version: str
    digest: str


class _Manifest(BaseModel):
    python_version: str = ""
    packages_list: Path | None = None  # None: the list that ships with the service
    parts: dict[str, str] = {}  # name to digest; a part that is not whole is not here


def check(path: Path) -> Runtime:
    """The runtime at `path`, if it is complete and made from this version's sources; else ConfigError.

    Looks at digests only, so that a worker can afford it at each start.
    """
    try:
        manifest = _read_manifest(path)
    except OSError as exc:
        raise ConfigError(f"cannot read the runtime: {exc}; run this as the user who built it") from exc
    if manifest is None:
        raise ConfigError(f"there is no runtime environment at {path}; run `sandbox runtime build`")
    listed = manifest.packages_list or PACKAGES
    packages = _packages_digest(listed, manifest.parts.get("base", "")) if listed.is_file() else ""
    wanted = {"base": manifest.parts.get("base"), "packages": packages, "jail": _jail_digest()}
    stale = [name for name, digest in wanted.items() if manifest.parts.get(name) != digest or not digest]
    if stale:
        raise ConfigError(f"the runtime at {path} is stale ({', '.join(stale)}); run `sandbox runtime build`")
    return Runtime(path / "root", manifest.python_version, _digest(manifest.parts))


def build(path: Path, *, python: Path | None = None, packages: Path | None = None, report: Report) -> None:
    """Make or renew the runtime at `path`: only what changed, nothing if nothing did.

    `python` is any interpreter of the host (default: the one that makes calls cheapest), `packages` a requirements
    file in place of ours. Builds of one path wait for each other. Raises ConfigError naming what the host lacks.
    """
    if packages is not None and not packages.is_file():
        raise ConfigError(f"there is no list of packages at {packages}")
    interpreter = ask_interpreter(python) if python else choose_interpreter()
    path = path.absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        _check_own(path)
        lock = (path / "lock").open("a")
    except OSError as exc:
        raise ConfigError(f"cannot write the runtime: {exc}; SANDBOX_JAIL__RUNTIME sets its place") from exc
    with lock:
        _wait_for(lock, report)
        _Build(path, interpreter, packages and packages.absolute(), lock, report).run()


def compile_argv(name: str, target: Path, *more_flags: str) -> list[str | Path]:
    """The command that compiles one of the files of /jail. Raises ConfigError without a compiler."""
    source, flags = _JAIL_FILES[name]
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise ConfigError("the jail needs a C compiler (cc, gcc or clang): `apt install gcc`")
    return [compiler, *_C_WARNINGS, *(flags or []), *more_flags, "-o", target, _HERE / source]


class _Build:
    def __init__(
        self, path: Path, interpreter: Interpreter, packages: Path | None, lock: TextIO, report: Report
    ) -> None:
        self.path = path
        self.root = path / "root"
        self.staging = path / "staging"
        self.interpreter = interpreter
        self.packages = packages or PACKAGES
        self.lock = lock
        self.report = report
        self.known = _read_manifest(path) or _Manifest()
        self.manifest = self.known.model_copy(update={"packages_list": packages}, deep=True)

    def run(self) -> None:
        base = _base_digest(self.interpreter)
        wanted = {"base": base, "packages": _packages_digest(self.packages, base), "jail": _jail_digest()}
        steps = {"base": self._base, "packages": self._packages, "jail": self._jail}
        if self.manifest == self.known and self.manifest.parts == wanted:
            self.report(f"the runtime at {self.path} is up to date")
            return
        self.path.chmod(0o755)  # whoever builds, workers of other users may read
        if not (self.path / "manifest.json").exists():
            self._write_manifest()  # from here on the folder is ours, also when this build dies
        for name, step in steps.items():
            if self.manifest.parts.get(name) != wanted[name]:
                self._forget_staging()
                self.staging.mkdir()
                step()
                self.manifest.parts[name] = wanted[name]
            self._write_manifest()
        self._forget_staging()
        self.report(f"the runtime at {self.path} is ready: {_size_bytes(self.root) / 1e6:.0f} MB")

    def _base(self) -> None:
        python = self.interpreter
        self.report(f"copying Python {python.version} and its standard library from {python.prefix}")
        if not python.is_preferred:
            self.report(ADVICE)
        new = self.staging / "root"
        rootfs.write_system_files(new)
        rootfs.copy_interpreter(python, new)
        self.report("copying small programs and shared libraries")
        missing = rootfs.copy_tools(new)
        missing += copy_libraries(new, rootfs.host_binaries(python), prefix=python.prefix)
        if missing:
            self.report(f"this host lacks, and so will programs: {', '.join(missing)}")
        self._compile(new)
        rootfs.open_to_all(new)
        self._forget(*self.manifest.parts)
        self.manifest.python_version = python.version
        if self.root.exists():
            shutil.rmtree(self.root)
        new.rename(self.root)

    def _packages(self) -> None:
        self.report(f"installing the packages of {self.packages}")
        new = self.staging / "root"  # laid out as root is, so that compiled files learn the right paths
        site = new / "python" / "site"
        self._pip(site)
        for folder in [*site.rglob("tests"), site / "bin"]:  # tests are a third of the whole
            if folder.is_dir():
                shutil.rmtree(folder)
        self._compile(new)
        binaries = [self.interpreter.executable, *binaries_below(site)]
        prefix = self.interpreter.prefix
        missing = copy_libraries(self.root, binaries, prefix=prefix, inside=new.resolve())
        if missing:
            self.report(f"this host lacks libraries of the packages: {', '.join(missing)}")
        self._move_in(site, self.root / "python" / "site", "packages")

    def _jail(self) -> None:
        self.report("compiling the jail's own files")
        new = self.staging / "jail"
        new.mkdir()
        for name, (source, flags) in _JAIL_FILES.items():
            if flags is None:
                shutil.copyfile(_HERE / source, new / name)
            else:
                self._run(compile_argv(name, new / name), f"compiling {source} failed")
        self._move_in(new, self.root / "jail", "jail")

    def _move_in(self, new: Path, place: Path, part: str) -> None:
        rootfs.open_to_all(new)
        self._forget(part)
        if place.exists():
            shutil.rmtree(place)
        new.rename(place)

    def _compile(self, root: Path) -> None:
        """Compile everything below /python once, for the jail can write nothing.

        With unchecked hashes: the files never change, so an import need not look at source or its time, and a
        copy that loses times stays valid.
        """
        self.report("compiling Python files")
        command: list[str | Path] = [self.interpreter.executable, "-I", "-m", "compileall", "-q", "-j", "0"]
        command += ["--invalidation-mode", "unchecked-hash", "-s", root, "-p", "/", root / "python"]
        self._run(command, "compiling Python files failed")

    def _pip(self, target: Path) -> None:
        # The host's settings of pip stay in force (mirrors, certificates), except those that forbid --target.
        environment = {
            **{name: value for name, value in os.environ.items() if name not in _PYTHONS_OWN},  # noqa: TID251
            "PIP_REQUIRE_VIRTUALENV": "0",
            "PIP_USER": "0",
            "PIP_NO_INPUT": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
        command = [*_pip_command(), "--python", self.interpreter.executable, "install", "--target", target]
        command += ["--quiet", "--no-compile", "--only-binary", ":all:", "--requirement", self.packages]
        python = self.interpreter
        failed = f"installing the packages failed for Python {python.version} of {python.prefix}"
        self._run(command, f"{failed}; --python takes another", environment)

    def _run(
        self, command: list[str | Path], failure: str, environment: dict[str, str] | None = None
    ) -> None:
        with tempfile.TemporaryFile() as output:
            # A group of its own, so that Ctrl-C reaches us alone: a pool of processes that lost its head waits for
            # ever. When we are killed and the command goes on, it holds the lock, and the next build waits for it.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=(self.lock.fileno(),),
                process_group=0,
            )
            try:
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            finally:  # also when we are interrupted; its number is its own until it is waited for
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            said = output.read().decode(errors="replace")
        if process.returncode != 0:
            raise ConfigError(f"{failure}:\n" + "\n".join(said.splitlines()[-20:]))

    def _forget(self, *parts: str) -> None:
        for part in parts:
            self.manifest.parts.pop(part, None)
        self._write_manifest()

    def _forget_staging(self) -> None:
        if self.staging.exists():
            shutil.rmtree(self.staging)

    def _write_manifest(self) -> None:
        new = self.path / "manifest.new"
        new.write_text(self.manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
        new.chmod(0o644)
        new.replace(self.path / "manifest.json")


def _check_own(path: Path) -> None:
    """Refuse a folder that somebody else uses: RUNTIME=/ would cost the home of root."""
    # In this order: another first build that begins meanwhile has written both marks before it makes anything else.
    foreign = {file.name for file in path.iterdir()} - {"lock", "manifest.new", "lost+found"}
    if foreign and not ((path / "lock").exists() and (path / "manifest.json").exists()):
        raise ConfigError(
            f"{path} holds {min(foreign)}, which is not ours; SANDBOX_JAIL__RUNTIME must name a folder of its own"
        )


def _read_manifest(path: Path) -> _Manifest | None:
    try:
        content = (path / "manifest.json").read_text(encoding="utf-8")
        return _Manifest.model_validate_json(content) if (path / "root").is_dir() else None
    except (FileNotFoundError, ValidationError):
        return None  # what we cannot read, we build anew


def _wait_for(lock: TextIO, report: Report) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        report("waiting for another build of the same runtime")
        fcntl.flock(lock, fcntl.LOCK_EX)


def _pip_command() -> list[str | Path]:
    """Our own environment's pip, or the one that CPython carries for `venv` where there is none (uv's)."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-I", "-m", "pip"]
    bundled = [*Path(sysconfig.get_path("stdlib")).glob("ensurepip/_bundled/pip-*.whl")]
    if bundled:
        return [sys.executable, "-I", bundled[0] / "pip"]
    raise ConfigError("installing the packages needs pip; add it to this environment (`uv pip install pip`)")


def _base_digest(interpreter: Interpreter) -> str:
    """Changes with the interpreter and with each tool of the host, by path, size and time."""
    files = [interpreter.executable, *(path for name in rootfs.TOOLS if (path := rootfs.tool_path(name)))]
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return _digest([LAYOUT, interpreter.model_dump(mode="json"), stats])


def _packages_digest(packages: Path, base: str) -> str:
    return _digest([LAYOUT, base, packages.read_text(encoding="utf-8")])


def _jail_digest() -> str:
    """Changes with the sources that ship with this version."""
    names = sorted({source for source, _ in _JAIL_FILES.values()} | {path.name for path in _HERE.glob("*.h")})
    sources = [(name, (_HERE / name).read_text(encoding="utf-8")) for name in names]
    return _digest([LAYOUT, _C_WARNINGS, _JAIL_FILES, sources])


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _size_bytes(tree: Path) -> int:
    return sum(path.lstat().st_size for path in tree.rglob("*"))
