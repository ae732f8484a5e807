"""Removing what a program has shaped, and the folders of a worker."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox.errors import ConfigError
from sandbox.jail.scratch import PREFIX, Scratch, ScratchFolders, remove_tree

DEPTH = 5000


def deep(path: Path) -> None:
    """A tree that no path leads through, and that recursion does not get to the end of."""
    fd = os.open(path, os.O_RDONLY)
    for _ in range(DEPTH):
        os.mkdir("0", dir_fd=fd)
        deeper = os.open("0", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = deeper
    os.close(os.open("file", os.O_CREAT, dir_fd=fd))
    os.close(fd)


def closed(path: Path) -> None:
    """Folders without any right, one in the other."""
    (path / "a" / "b" / "c").mkdir(parents=True)
    (path / "a" / "b" / "file").touch()
    for name in ("a/b/c", "a/b", "a"):
        (path / name).chmod(0)


def named(path: Path) -> None:
    """Names of any bytes, and those that folders get when they are moved."""
    for name in (b"\xff\xfe", b"new\nline", b" ", b"-rf", b"x" * 255):
        Path(os.fsdecode(os.fsencode(path) + b"/" + name)).mkdir()
    for name in ("0", "1", "2"):
        (path / name).touch()
        (path / "sub" / name / name).mkdir(parents=True)
    (path / "3" / "full").mkdir(parents=True)


def special(path: Path) -> None:
    """What is neither file nor folder, and what would block whoever opened it."""
    os.mkfifo(path / "pipe")
    (path / "nowhere").symlink_to("/nowhere")
    (path / "itself").symlink_to(path)
    (path / "main.py").mkdir()


@pytest.mark.parametrize("shape", [deep, closed, named, special])
def test_any_shape_is_removed(tmp_path: Path, shape: Callable[[Path], None]) -> None:
    """Whatever tree a program leaves, nothing of it is left."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    shape(folder)
    remove_tree(folder)
    assert not folder.exists()


def test_links_are_not_followed(tmp_path: Path) -> None:
    """Where a link in the tree, or in the place of the tree, leads to is left alone, with its rights."""
    kept, folder = tmp_path / "kept", tmp_path / "scratch"
    kept.mkdir(mode=0o755)
    (kept / "file").touch()
    (folder / "sub").mkdir(parents=True)
    for link in (folder / "link", folder / "sub" / "link", tmp_path / "top"):
        link.symlink_to(kept)
    os.link(kept / "file", folder / "same")
    remove_tree(folder)
    with pytest.raises(OSError, match="Not a directory"):
        remove_tree(tmp_path / "top")
    assert (kept / "file").exists()
    assert kept.stat().st_mode & 0o777 == 0o755


def test_a_folder_for_each_call(tmp_path: Path) -> None:
    """It is empty and its owner's alone, also when the last one could not be removed."""
    scratch = Scratch(tmp_path / "1", None)
    for _ in range(2):
        fd = scratch.begin()
        assert os.fstat(fd).st_mode & 0o777 == 0o700
        assert not list(scratch.path.iterdir())
        (scratch.path / "left").touch()
        os.close(fd)
    assert not scratch.is_gone()
    scratch.remove()
    assert scratch.is_gone()


def test_workers_apart(tmp_path: Path) -> None:
    """Two workers never have the same folder, and so as root never the same uids."""
    path = tmp_path / f"{PREFIX}1"
    folders = ScratchFolders(path)
    with pytest.raises(ConfigError, match=r"another worker has .* SANDBOX_JAIL__FIRST_UID"):
        ScratchFolders(path)
    folders.close()
    assert not path.exists()
    ScratchFolders(path).close()


@pytest.mark.parametrize("name", ["own", "other"])
def test_a_killed_worker_is_swept_up_after(tmp_path: Path, name: str) -> None:
    """Its folder is removed by the next worker, with the same name or another; that of a living one is not."""
    living = ScratchFolders(tmp_path / f"{PREFIX}living")
    code = (
        "import os, pathlib, sys\nfrom sandbox.jail.scratch import ScratchFolders\n"
        "folders = ScratchFolders(pathlib.Path(sys.argv[1]))\n"
        "folders.add(1, None).begin()\nos._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / f"{PREFIX}own"], check=True)
    assert (tmp_path / f"{PREFIX}own" / "1").exists()
    folders = ScratchFolders(tmp_path / f"{PREFIX}{name}")
    assert sorted(tmp_path.rglob("*")) == sorted(tmp_path / f"{PREFIX}{each}" for each in ("living", name))
    folders.close()
    living.close()


def test_a_folder_of_somebody_else(tmp_path: Path) -> None:
    """What somebody else made under our name is not used, and is left as it is."""
    if os.geteuid() != 0:
        pytest.skip("it takes root to make a folder for somebody else")
    path = tmp_path / f"{PREFIX}1"
    path.mkdir()
    os.chown(path, 65534, 65534)
    with pytest.raises(ConfigError, match="somebody else made"):
        ScratchFolders(path)
    ScratchFolders(tmp_path / f"{PREFIX}2").close()
    assert path.stat().st_uid == 65534
