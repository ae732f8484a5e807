"""The shared libraries that programs in the jail need: found with the host's own loader, and copied.

Nothing in the jail tells the loader where to look: there is no cache (to make one takes root), and programs
may clear LD_LIBRARY_PATH. So everything lies where it looks by itself.
"""

from __future__ import annotations

import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

from sandbox.errors import ConfigError

#: Opened by name at run time (by glibc itself, or by programs through ctypes), so that `ldd` does not tell.
_OPENED_BY_NAME = [
    *("libgcc_s.so.1", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libnss_files.so.2"),
]

_LIBRARY = re.compile(r"^\t(?:(?P<name>\S+) => )?(?P<path>/.+) \(0x[0-9a-f]+\)$")
_MISSING = re.compile(r"^\t(?P<name>\S+) => not found$")


def copy_libraries(
    root: Path, binaries: list[Path], *, prefix: Path, inside: Path | None = None
) -> list[str]:
    """Copy the shared libraries that the binaries need, and return the names that were not found.

    Libraries of the system go to the folder in which the loader finds libc by itself, whatever folder a
    cache or a run path led to on the host. Libraries of the interpreter's own prefix keep their place
    relative to its executable, so that run paths with $ORIGIN hold; for absolute ones the loader's folder
    links to them. Libraries that lie `inside` a folder come with it and are left alone, and so is what root
    has already.
    """
    found, missing = _needed(binaries, inside)
    libc = found.get("libc.so.6")
    if libc is None:
        raise ConfigError("no program here uses libc.so.6; the runtime can be built on glibc systems only")
    for name in _OPENED_BY_NAME:
        if name not in found and (libc.parent / name).exists():
            found[name] = libc.parent / name
    loaders_folder = root / libc.parent.relative_to("/")
    for name, source in sorted(found.items()):
        place = loaders_folder / name
        if name.startswith("/"):  # the loader itself: binaries name it by its absolute path
            place = root / name.lstrip("/")
        elif prefix != Path("/usr") and source.is_relative_to(prefix):
            own = Path("python") / source.relative_to(prefix)
            _link(place, f"/{own}")
            place = root / own
        if not place.exists():
            copy_file(source, place)
    return sorted(name for name in missing if not (loaders_folder / name).exists())


def _needed(binaries: list[Path], inside: Path | None) -> tuple[dict[str, Path], set[str]]:
    found: dict[str, Path] = {}
    missing: set[str] = set()
    for line in _ldd(binaries):
        if match := _LIBRARY.match(line):
            path = Path(match["path"])
            path = path.parent.resolve() / path.name  # run paths bring ".." and links into it
            if inside is None or not path.is_relative_to(inside):
                found.setdefault(match["name"] or match["path"], path)
        elif match := _MISSING.match(line):
            missing.add(match["name"])
    if inside is not None:  # wheels carry libraries that only find each other once the first is loaded
        missing -= {path.name for path in binaries_below(inside)}
    return found, missing - set(found)


def _ldd(binaries: list[Path]) -> Iterator[str]:
    """What the loader says of each, in command lines of bounded length."""
    for start in range(0, len(binaries), 500):
        try:
            # ldd fails when one of many is static; what it says of the others still holds.
            command: list[str | Path] = ["ldd", *binaries[start : start + 500]]
            answer = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError as exc:
            raise ConfigError(
                "`ldd` is missing; install it (Debian: libc-bin, Fedora: glibc-common)"
            ) from exc
        yield from answer.stdout.splitlines()


def binaries_below(folder: Path) -> list[Path]:
    """Every shared object below the folder."""
    return [path for path in folder.rglob("*.so*") if path.is_file()]


def copy_file(source: Path | str, target: Path | str) -> None:
    """Copy content and executable bit into a new inode. A file that exists is replaced by a whole one."""
    source, target = Path(source), Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.with_name(f".new-{target.name}")
    shutil.copyfile(source, new)
    new.chmod(0o755 if source.stat().st_mode & stat.S_IXUSR else 0o644)
    new.replace(target)


def _link(link: Path, target: str) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink() and not link.exists():
        link.symlink_to(target)
