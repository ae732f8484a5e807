"""What the jail's root file system takes from the host: interpreter and tools (libraries.py has the rest).

Rules:
1. Everything is copied, nothing is linked or mounted. All mount namespaces share the page cache of a file, so
   a kernel hole that lets a program change a read-only file (Dirty Pipe, Copy Fail) must find only the jail's
   own files.
2. Nothing depends on a place of the host. The interpreter becomes /python wherever it came from, and shared
   libraries lie where the loader looks without a cache and without LD_LIBRARY_PATH, which programs may clear.
3. Modes are set by us, never by the umask: the jail's users are ordinary ones outside.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from pathlib import Path

from sandbox.jail.interpreter import Interpreter
from sandbox.jail.libraries import binaries_below, copy_file
from sandbox.jail.policy import MAX_SLOTS

#: Small programs that model-written code starts through `subprocess`. One that the host lacks is left out.
TOOLS = [
    *("sh", "bash", "awk", "basename", "cat", "cp", "cut", "date", "dirname", "echo", "env", "expr"),
    *("false", "find", "grep", "head", "ls", "mkdir", "mv", "printf", "pwd", "rm", "sed", "seq"),
    *("sleep", "sort", "tail", "tee", "touch", "tr", "true", "uname", "uniq", "wc", "xargs"),
]

#: Directories of the standard library that a program cannot use here, or that need what the jail has not.
_DROPPED_DIRECTORIES = {
    "test", "tests", "idlelib", "idle_test", "tkinter", "turtledemo", "ensurepip", "lib2to3",
    "site-packages", "dist-packages", "__pycache__",
}  # fmt: skip
_DROPPED_NAMES = re.compile(
    r"config-\d.*|_tkinter\..*|_test.*\.so|_ctypes_test.*|_xxtestfuzz.*|xxlimited.*|EXTERNALLY-MANAGED"
)


def copy_interpreter(interpreter: Interpreter, root: Path) -> None:
    """Make /python: executable, standard library and compiled extensions."""
    python = root / "python"
    (python / "bin").mkdir(parents=True)
    name = f"python{interpreter.short_version}"
    copy_file(interpreter.executable, python / "bin" / name)
    for alias in ("python3", "python"):
        (python / "bin" / alias).symlink_to(name)
    stdlib = python / interpreter.library_folder / name
    _copy_tree(interpreter.stdlib, stdlib)
    for extensions in interpreter.extensions:  # beside the rest, except where lib and lib64 are two folders
        _copy_tree(extensions, stdlib / "lib-dynload")
    if interpreter.library_folder != "lib":
        (python / "lib").symlink_to(interpreter.library_folder)
    _rename_prefix(stdlib, str(interpreter.prefix))
    # Found by every start of the interpreter, also by `python -I` and with an empty environment.
    site = root / interpreter.site.relative_to("/")
    site.mkdir(parents=True)
    (site / "packages.pth").write_text("/python/site\n", encoding="ascii")


def _rename_prefix(stdlib: Path, prefix: str) -> None:
    """Let sysconfig say /python: its build-time values are text in one module."""
    whole_path = re.compile(re.escape(prefix) + r"(?=[/'\"\s:]|$)", re.MULTILINE)
    for module in stdlib.glob("_sysconfigdata*.py"):
        module.write_text(whole_path.sub("/python", module.read_text(encoding="utf-8")), encoding="utf-8")


def copy_tools(root: Path) -> list[str]:
    """Copy TOOLS into /usr/bin and return the names that this host lacks.

    What is a script on the host is left out as well. Names of one multi-call binary stay links to one file.
    """
    copied: dict[Path, str] = {}
    missing = []
    for name in TOOLS:
        source = tool_path(name)
        if source is None:
            missing.append(name)
        elif source in copied:
            (root / "usr/bin" / name).symlink_to(copied[source])
        else:
            copy_file(source, root / "usr/bin" / name)
            copied[source] = name
    for name in ("python3", "python"):
        (root / "usr/bin" / name).symlink_to("/python/bin/python3")
    return missing


def tool_path(name: str) -> Path | None:
    """The host's binary of that name with all links followed, or None."""
    found = shutil.which(name, path="/usr/bin:/bin")
    if found is None:
        return None
    path = Path(found).resolve()
    with path.open("rb") as file:
        return path if file.read(4) == b"\x7fELF" else None


def host_binaries(interpreter: Interpreter) -> list[Path]:
    """The host's files behind what `copy_interpreter` and `copy_tools` copy, for their libraries."""
    extensions = [file for folder in interpreter.extensions for file in binaries_below(folder)]
    tools = [path for name in TOOLS if (path := tool_path(name))]
    return [
        interpreter.executable,
        *tools,
        *(file for file in extensions if not _DROPPED_NAMES.fullmatch(file.name)),
    ]


def write_system_files(root: Path) -> None:
    """Make /etc, mount points and device names: what programs expect of any Linux."""
    for folder in ("proc", "tmp", "dev/shm", "sys", "etc", "usr/bin", "usr/lib", "usr/lib64", "var/tmp"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    for device in ("null", "zero", "full", "random", "urandom"):
        (root / "dev" / device).touch()  # a device of the host is mounted over each
    for link, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        (root / "dev" / link).symlink_to(f"/proc/self/fd{target}")
    # Slots differ by their uid. All have the same name, so that `getpass` and `pwd` work and no program
    # prints which slot it got.
    users = [("root", 0), *(("sandbox", uid) for uid in range(1, MAX_SLOTS + 1)), ("nobody", 65534)]
    passwd = "".join(f"{name}:x:{uid}:{uid}:{name}:/tmp:/bin/sh\n" for name, uid in users)
    group = "".join(f"{name}:x:{gid}:\n" for name, gid in users)
    files = {
        "passwd": passwd,
        "group": group,
        "hosts": "127.0.0.1 localhost\n::1 localhost\n",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    }
    for name, content in files.items():
        (root / "etc" / name).write_text(content, encoding="ascii")
    for locale in ("C.utf8", "C.UTF-8"):  # libc has no UTF-8 of its own; distributions differ in the name
        source = Path("/usr/lib/locale") / locale
        if source.is_dir():
            _copy_tree(source, root / "usr/lib/locale" / locale)


def open_to_all(tree: Path) -> None:
    """Give everyone read access, and nobody write access but the owner, below and including `tree`."""
    for folder, _, names in os.walk(tree):
        os.chmod(folder, 0o755)  # noqa: PTH101, S103 - one of some ten thousand
        for name in names:
            path = os.path.join(folder, name)  # noqa: PTH118
            mode = os.lstat(path).st_mode
            if stat.S_ISREG(mode):
                os.chmod(path, 0o755 if mode & stat.S_IXUSR else 0o644)  # noqa: PTH101


def _copy_tree(source: Path, target: Path) -> None:
    """Copy with links followed; what dangles on the host (Debian has such links) stays behind."""

    def dropped(_: str, names: list[str]) -> list[str]:
        return [name for name in names if name in _DROPPED_DIRECTORIES or _DROPPED_NAMES.fullmatch(name)]

    shutil.copytree(
        source,
        target,
        ignore=dropped,
        ignore_dangling_symlinks=True,
        copy_function=copy_file,
        dirs_exist_ok=True,
    )
