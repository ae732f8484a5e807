"""The runtime environment, built for real and tried inside a chroot."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from sandbox.errors import ConfigError
from sandbox.jail import runtime
from sandbox.jail.interpreter import ask_interpreter, choose_interpreter

DEBIANS_PYTHON = Path("/usr/bin/python3")


def ignore(_: str) -> None:
    """Nobody reads the progress."""


def run_inside(root: Path, *argv: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command with `root` as its /, as an ordinary user may."""
    enter = ["/usr/sbin/chroot"] if os.geteuid() == 0 else ["unshare", "-r", "/usr/sbin/chroot"]
    environment = {"PATH": "/python/bin:/usr/bin:/bin", "HOME": "/tmp"} if env is None else env
    command = [*enter, root, *argv]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=50, check=False)


def python_inside(root: Path, code: str, env: dict[str, str] | None = None) -> str:
    """What a program prints inside; it must end well."""
    done = run_inside(root, "/python/bin/python3", "-c", code, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def make_wheel(folder: Path, version: str) -> Path:
    """A package `tiny` with a test folder, as a wheel on the disk, so that most tests need no network."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"tiny-{version}-py3-none-any.whl"
    info = f"tiny-{version}.dist-info"
    files = {
        "tiny/__init__.py": f"version = {version!r}\n",
        "tiny/tests/__init__.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: tiny\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return wheel


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A list with one package from the disk."""
    listed = tmp_path / "packages.txt"
    listed.write_text(f"tiny @ {make_wheel(tmp_path, '1.0').as_uri()}\n")
    return listed


@pytest.fixture(scope="session")
def full(tmp_path_factory: pytest.TempPathFactory) -> runtime.Runtime:
    """The runtime as it ships, in a folder with a space, built under the narrowest umask."""
    path = tmp_path_factory.mktemp("with all packages") / "run time"
    before = os.umask(0o077)
    try:
        runtime.build(path, report=ignore)
    finally:
        os.umask(before)
    return runtime.check(path)


class TestInside:
    """What programs find."""

    def test_every_package_can_be_imported(self, full: runtime.Runtime) -> None:
        """All packages that we promise are there and find their libraries."""
        code = (
            "import numpy.testing, scipy.optimize, scipy.stats, sympy, mpmath, pandas, networkx, math_verify\n"
            "import pylatexenc.latex2text\n"
            "print(numpy.linalg.det([[2, 0], [0, 3]]), sympy.factorint(12), scipy.stats.norm.cdf(0))\n"
            "print(math_verify.verify(math_verify.parse('$1/2$'), math_verify.parse('0.5')))"
        )
        assert python_inside(full.root, code).splitlines() == ["6.0 {2: 2, 3: 1} 0.5", "True"]

    def test_the_standard_library_works(self, full: runtime.Runtime) -> None:
        """Modules that lean on libraries or data of the system have them."""
        code = (
            "import bz2, ctypes, curses, decimal, getpass, hashlib, locale, lzma, multiprocessing, pwd, readline\n"
            "import sqlite3, ssl, uuid, zlib, zoneinfo\n"
            "locale.setlocale(locale.LC_ALL, 'C.UTF-8')\n"
            "print(sqlite3.connect(':memory:').execute('select 1+1').fetchone())\n"
            "print(ctypes.CDLL('libm.so.6') is not None, ssl.create_default_context() is not None)\n"
            "print(zoneinfo.ZoneInfo('Europe/Berlin').key, decimal.Decimal(1) / 7)\n"
            "print(pwd.getpwuid(7).pw_name, pwd.getpwuid(65534).pw_name, pwd.getpwuid(0).pw_dir)\n"
            "queue = multiprocessing.Queue(); queue.put(5); print(queue.get())"
        )
        assert python_inside(full.root, code).splitlines() == [
            "(2,)",
            "True True",
            "Europe/Berlin 0.1428571428571428571428571429",
            "sandbox nobody /tmp",
            "5",
        ]

    def test_programs_start_programs(self, full: runtime.Runtime) -> None:
        """A shell, small programs and another interpreter start, and that one finds the packages too."""
        code = (
            "import subprocess, sys\n"
            'shell = \'printf "b\\\\na\\\\n" | sort | head -n 1; python3 -c "print(1+1)"; awk "BEGIN {print 3}"\'\n'
            "print(subprocess.run(shell, shell=True, capture_output=True, text=True, check=True).stdout)\n"
            "inner = [sys.executable, '-I', '-c', 'import numpy; print(numpy.__name__)']\n"
            "print(subprocess.run(inner, env={}, capture_output=True, text=True, check=True).stdout)"
        )
        assert python_inside(full.root, code).split() == ["a", "2", "3", "numpy"]

    def test_it_believes_to_live_in_python(self, full: runtime.Runtime) -> None:
        """No place of the host shows in the interpreter's idea of itself, and each folder is there once."""
        code = (
            "import json, sys, sysconfig\n"
            "print(json.dumps([sys.prefix, sys.executable, sysconfig.get_config_var('prefix'),"
            " sysconfig.get_path('stdlib'), sys.path[1:]]))"
        )
        environment = {"PYTHONPATH": "/python/site"}
        prefix, executable, configured, stdlib, path = json.loads(python_inside(full.root, code, environment))
        assert [prefix, executable, configured] == ["/python", "/python/bin/python3", "/python"]
        assert stdlib == f"/python/lib/python{full.python_version.rpartition('.')[0]}"
        assert path.count("/python/site") == 1
        assert all(folder.startswith("/python/") for folder in path)

    def test_nothing_is_compiled_inside(self, full: runtime.Runtime) -> None:
        """Every module has compiled code whose source is never looked at."""
        sources = [path for path in (full.root / "python").rglob("*.py") if "lib2to3" not in path.parts]
        compiled = {path.parent.parent / (path.name.split(".")[0] + ".py"): path for path in
                    (full.root / "python").rglob("__pycache__/*.pyc")}  # fmt: skip
        unchecked_hash = (1).to_bytes(4, "little")
        assert [path for path in sources if path not in compiled] == []
        assert {path.read_bytes()[4:8] for path in compiled.values()} == {unchecked_hash}

    def test_the_jails_files_are_there(self, full: runtime.Runtime) -> None:
        """The C files were compiled: a library that loads, and an init that needs nothing."""
        assert (
            python_inside(full.root, "import ctypes; ctypes.PyDLL('/jail/libfork.so'); print('loaded')")
            == "loaded"
        )
        described = subprocess.run(
            ["ldd", full.root / "jail/init"], capture_output=True, text=True, check=False
        )
        assert "not a dynamic executable" in described.stderr + described.stdout
        assert (full.root / "jail/init").stat().st_size < 4096


class TestApart:
    """What the jail shares with the host: nothing."""

    def test_no_inode_is_shared(self, full: runtime.Runtime) -> None:
        """No file is a hard link and no link leads out, so no page of the host's cache can be reached."""
        files = [path for path in full.root.rglob("*") if path.is_file() and not path.is_symlink()]
        assert [path for path in files if path.stat().st_nlink != 1] == []
        prefix = str(choose_interpreter().prefix)
        links = [path for path in full.root.rglob("*") if path.is_symlink()]
        assert [path for path in links if str(path.readlink()).startswith(prefix)] == []

    def test_everybody_may_read_and_nobody_write(self, full: runtime.Runtime) -> None:
        """Modes do not follow the umask of the build."""
        for path in [full.root.parent, full.root.parent / "manifest.json", full.root, *full.root.rglob("*")]:
            mode = path.lstat().st_mode
            if not path.is_symlink():
                wanted = 0o755 if path.is_dir() or mode & 0o100 else 0o644
                assert mode & 0o7777 == wanted, path

    def test_tests_are_left_out(self, full: runtime.Runtime) -> None:
        """Neither the standard library nor the packages bring their tests."""
        assert [path for path in full.root.rglob("tests") if path.is_dir()] == []
        assert not list(full.root.glob("python/lib/python3*/test"))


class TestBuild:
    """Building: only what changed, and never half."""

    def test_a_second_build_changes_nothing(self, tmp_path: Path, packages: Path) -> None:
        """An unchanged build only says so."""
        runtime.build(tmp_path / "r", packages=packages, report=ignore)
        first = runtime.check(tmp_path / "r")
        before = (tmp_path / "r/manifest.json").stat().st_mtime_ns
        lines: list[str] = []
        runtime.build(tmp_path / "r", packages=packages, report=lines.append)
        assert lines == [f"the runtime at {tmp_path / 'r'} is up to date"]
        assert (tmp_path / "r/manifest.json").stat().st_mtime_ns == before
        assert runtime.check(tmp_path / "r") == first

    def test_a_changed_list_renews_the_packages_only(self, tmp_path: Path, packages: Path) -> None:
        """A new version comes in, the old goes, the interpreter stays, the digest changes, and `check` saw it coming."""
        runtime.build(tmp_path / "r", packages=packages, report=ignore)
        first = runtime.check(tmp_path / "r")
        interpreter = (first.root / "python/bin/python3").resolve().stat().st_ino
        packages.write_text(f"tiny @ {make_wheel(tmp_path, '2.0').as_uri()}\n")
        with pytest.raises(ConfigError, match=r"stale \(packages\).*sandbox runtime build"):
            runtime.check(tmp_path / "r")
        runtime.build(tmp_path / "r", packages=packages, report=ignore)
        second = runtime.check(tmp_path / "r")
        assert second.digest != first.digest
        assert (second.root / "python/bin/python3").resolve().stat().st_ino == interpreter
        assert python_inside(second.root, "import tiny; print(tiny.version)") == "2.0"
        assert not list(second.root.glob("python/site/tiny-1.0*"))
        assert not (second.root / "python/site/tiny/tests").exists()

    def test_a_list_that_moved(self, tmp_path: Path, packages: Path) -> None:
        """The same list at another place rebuilds nothing, and `check` looks at the new place from then on."""
        runtime.build(tmp_path / "r", packages=packages, report=ignore)
        moved = packages.rename(tmp_path / "moved.txt")
        lines: list[str] = []
        runtime.build(tmp_path / "r", packages=moved, report=lines.append)
        assert len(lines) == 1
        assert runtime.check(tmp_path / "r").root.is_dir()

    def test_no_list(self, tmp_path: Path) -> None:
        """A list that is not there is named."""
        with pytest.raises(ConfigError, match=r"no list of packages at .*missing\.txt"):
            runtime.build(tmp_path / "r", packages=tmp_path / "missing.txt", report=ignore)

    def test_a_list_that_cannot_be_installed(self, tmp_path: Path, packages: Path) -> None:
        """Pip's own words are the error, and what was whole before it is kept for the next build."""
        good = packages.read_text()
        packages.write_text("tiny @ file:///nowhere/tiny-9-py3-none-any.whl\n")
        with pytest.raises(
            ConfigError,
            match=r"(?s)installing the packages failed for Python 3\.1\d\..*; --python takes another.*nowhere",
        ):
            runtime.build(tmp_path / "r", packages=packages, report=ignore)
        with pytest.raises(ConfigError, match="sandbox runtime build"):
            runtime.check(tmp_path / "r")
        packages.write_text(good)
        lines: list[str] = []
        runtime.build(tmp_path / "r", packages=packages, report=lines.append)
        assert not [line for line in lines if line.startswith("copying")]
        assert runtime.check(tmp_path / "r").root == tmp_path / "r/root"

    def test_a_killed_build_is_not_complete(self, tmp_path: Path, packages: Path) -> None:
        """After `kill -9` in the middle `check` refuses, and the next build makes it whole."""
        code = (
            "import sys; from pathlib import Path; from sandbox.jail import runtime\n"
            "runtime.build(Path(sys.argv[1]), packages=Path(sys.argv[2]), report=lambda line: print(line, flush=True))"
        )
        with subprocess.Popen(
            [sys.executable, "-c", code, tmp_path / "r", packages], stdout=subprocess.PIPE, text=True
        ) as build:
            assert build.stdout is not None
            next(line for line in build.stdout if line.startswith("compiling Python"))
            build.send_signal(signal.SIGKILL)
        with pytest.raises(ConfigError, match="sandbox runtime build"):
            runtime.check(tmp_path / "r")
        runtime.build(tmp_path / "r", packages=packages, report=ignore)
        built = runtime.check(tmp_path / "r")
        assert python_inside(built.root, "import tiny; print(tiny.version)") == "1.0"
        assert not (tmp_path / "r/staging").exists()

    def test_an_interrupted_build_holds_up_nobody(self, tmp_path: Path, packages: Path) -> None:
        """Ctrl-C while a pool of processes compiles ends all of them, and the next build need not wait."""
        code = (
            "import sys; from pathlib import Path; from sandbox.jail import runtime\n"
            "runtime.build(Path(sys.argv[1]), packages=Path(sys.argv[2]), report=print)"
        )
        with subprocess.Popen(
            [sys.executable, "-c", code, tmp_path / "r", packages],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        ) as build:
            staged = tmp_path / "r/staging/root/python"
            while not any(staged.rglob("*.pyc")):  # nobody tells us that the pool is at work
                assert build.poll() is None
            os.killpg(build.pid, signal.SIGINT)
        with (tmp_path / "r/lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        runtime.build(tmp_path / "r", packages=packages, report=ignore)
        assert runtime.check(tmp_path / "r").root.is_dir()

    def test_two_builds_at_once(self, tmp_path: Path, packages: Path) -> None:
        """One builds, the other waits and finds all done."""
        second_waits = threading.Event()
        seconds_lines: list[str] = []

        def note(line: str) -> None:
            seconds_lines.append(line)
            second_waits.set()

        second = threading.Thread(
            target=runtime.build, args=(tmp_path / "r",), kwargs={"packages": packages, "report": note}
        )

        def start_second(_: str) -> None:
            if not second.ident:
                second.start()
                second_waits.wait()

        runtime.build(tmp_path / "r", packages=packages, report=start_second)
        second.join()
        assert seconds_lines == [
            "waiting for another build of the same runtime",
            f"the runtime at {tmp_path / 'r'} is up to date",
        ]
        assert runtime.check(tmp_path / "r").root.is_dir()

    @pytest.mark.skipif(not DEBIANS_PYTHON.exists(), reason="there is no /usr/bin/python3 here")
    def test_another_interpreter(self, tmp_path: Path, packages: Path) -> None:
        """The system's own interpreter can be the jail's, without the packages that the system has for it."""
        version = ask_interpreter(DEBIANS_PYTHON).version
        runtime.build(tmp_path / "r", python=DEBIANS_PYTHON, packages=packages, report=ignore)
        built = runtime.check(tmp_path / "r")
        assert built.python_version == version
        code = "import sys, ssl, tiny; print(sys.version.split()[0], sys.prefix, tiny.version)"
        assert python_inside(built.root, code) == f"{version} /python 1.0"
        site = [path.name for path in built.root.glob("python/**/*-packages/*")]
        assert site == ["packages.pth"]

    def test_no_runtime(self, tmp_path: Path) -> None:
        """A missing runtime is named with the command that makes it."""
        with pytest.raises(ConfigError, match=r"no runtime environment at .*sandbox runtime build"):
            runtime.check(tmp_path / "r")

    def test_a_manifest_that_is_no_manifest(self, tmp_path: Path) -> None:
        """Garbage counts as nothing built."""
        (tmp_path / "root").mkdir()
        (tmp_path / "manifest.json").write_text("[1")
        with pytest.raises(ConfigError, match="sandbox runtime build"):
            runtime.check(tmp_path)

    @pytest.mark.parametrize("name", ["root", "staging", "anything"])
    def test_a_folder_that_is_not_ours(self, tmp_path: Path, packages: Path, name: str) -> None:
        """A place with something of somebody else is refused, and nothing there is touched."""
        precious = tmp_path / "r" / name / "precious"
        precious.parent.mkdir(parents=True)
        precious.write_text("work of years")
        (tmp_path / "r").chmod(0o700)
        with pytest.raises(
            ConfigError, match=rf"r holds {name}, .* SANDBOX_JAIL__RUNTIME must name a folder of"
        ):
            runtime.build(tmp_path / "r", packages=packages, report=ignore)
        assert precious.read_text() == "work of years"
        assert [path.name for path in (tmp_path / "r").iterdir()] == [name]
        assert (tmp_path / "r").stat().st_mode & 0o777 == 0o700

    def test_a_manifest_that_is_not_ours(self, tmp_path: Path, packages: Path) -> None:
        """A manifest.json of something else is no licence to remove what is beside it."""
        (tmp_path / "r/root").mkdir(parents=True)
        (tmp_path / "r/manifest.json").write_text('{"name": "somebody else\'s"}')
        with pytest.raises(ConfigError, match="SANDBOX_JAIL__RUNTIME must name a folder of its own"):
            runtime.build(tmp_path / "r", packages=packages, report=ignore)
        assert sorted(path.name for path in (tmp_path / "r").iterdir()) == ["manifest.json", "root"]

    def test_no_compiler(self, tmp_path: Path, packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A host without a C compiler is told what to install."""
        runtime.build(tmp_path / "r", packages=packages, report=ignore)
        manifest = json.loads((tmp_path / "r/manifest.json").read_text())
        del manifest["parts"]["jail"]
        (tmp_path / "r/manifest.json").write_text(json.dumps(manifest))
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(ConfigError, match="needs a C compiler"):
            runtime.build(tmp_path / "r", packages=packages, report=ignore)

    def test_no_right_to_write(self, packages: Path) -> None:
        """A place that cannot be written is named with the setting that moves it."""
        with pytest.raises(ConfigError, match="SANDBOX_JAIL__RUNTIME"):
            runtime.build(Path("/proc/nowhere"), packages=packages, report=ignore)

    def test_no_interpreter(self, tmp_path: Path) -> None:
        """What is no Python is named."""
        with pytest.raises(ConfigError, match=r"/bin/true is no Python 3\.11"):
            runtime.build(tmp_path / "r", python=Path("/bin/true"), report=ignore)

    def test_an_interpreter_that_is_dearer(self, tmp_path: Path, packages: Path) -> None:
        """The one that runs the service is taken when asked for, and the build says what that costs."""
        ours = ask_interpreter(Path(sys.executable))
        lines: list[str] = []
        runtime.build(tmp_path / "r", python=Path(sys.executable), packages=packages, report=lines.append)
        assert runtime.check(tmp_path / "r").python_version == ours.version
        assert (runtime.ADVICE in lines) == (not ours.is_preferred)

    def test_the_best_interpreter_is_the_default(self, full: runtime.Runtime) -> None:
        """Nobody needs to name it."""
        assert full.python_version == choose_interpreter().version
