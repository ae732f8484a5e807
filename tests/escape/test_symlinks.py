"""Links lead nowhere that their maker could not go."""

from __future__ import annotations

from tests.sandbox.jail.box import Box

from .probe import outcomes


def test_links_stay_inside(box: Box) -> None:
    """A link to the outside leads to the jail's own file of that name, or to none."""
    code = """
for n, target in enumerate(("/root", "/home", "/srv", "/etc/shadow", "/proc/1/root", "/proc/1/cwd", "/sys/kernel", "/run/roc-sandbox", "/var/run")):
    os.symlink(target, f"link{n}")
    attempt(target, lambda: os.listdir(f"link{n}"))
os.symlink("/etc/passwd", "passwd")
print("passwd", "sandbox" in open("passwd").read())
os.symlink("/jail/forkserver.py", "forkserver")
attempt("write-through", lambda: open("forkserver", "w"))
"""
    found = outcomes(box, code)
    assert (found.pop("passwd"), found.pop("write-through")) == ("True", "EROFS")
    assert set(found.values()) <= {"ENOENT", "EACCES", "ENOTDIR"}


def test_links_left_for_the_next_call(box: Box) -> None:
    """Links in place of our own files' names do not catch those of the next call."""
    box.out(
        "import os\nos.unlink('main.py')\nos.symlink('/etc/passwd', 'main.py')\nos.symlink('/dev/shm/caught', 'data.txt')"
    )
    look = "import os\nprint(os.path.islink('main.py'), os.path.islink('data.txt'), os.listdir('/dev/shm'))"
    assert box.out(look, files={"data.txt": "mine"}) == "False False []\n"


def test_names_that_lead_out(box: Box) -> None:
    """A file's name that the contract lets through cannot leave the folder."""
    names = ["~/x", "$HOME", "a b", "-rf", "\\..\\x", "%2e%2e/x", "main.py.bak", "é", "\u202e", "..."]
    code = "import os\nprint(sorted(os.path.join(f, n) for f, _, ns in os.walk('/tmp') for n in ns if n != 'main.py'))"
    assert eval(box.out(code, files=dict.fromkeys(names, "x"))) == sorted(f"/tmp/{name}" for name in names)
