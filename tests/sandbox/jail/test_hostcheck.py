"""The host check, on this host and on hosts that are described by small trees of files."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from sandbox.jail import hostcheck
from sandbox.jail.cgroups import Place
from sandbox.jail.hostcheck import ADVICE, NAMESPACES
from sandbox.settings import JailSettings

V1 = Place("v1", {"memory": Path("/sys/fs/cgroup/memory")})
V2 = Place("v2", {"": Path("/sys/fs/cgroup")})
NONE = Place("none", {}, "no cgroup hierarchy is mounted")
ALL_IDS = "         0          0 4294967295\n"


def proc(folder: Path, **files: str) -> Path:
    """A /proc with these files; two underscores stand for a slash."""
    for name, content in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


class TestThisHost:
    """Everything for real."""

    def test_every_check_has_a_remedy_or_is_fine(self, tmp_path: Path) -> None:
        """Each check says what it found, names each subject once, and a lack comes with its remedy."""
        checks = hostcheck.check_host(JailSettings(runtime=tmp_path))
        assert len({check.name for check in checks}) == len(checks)
        for check in checks:
            assert check.level in {NAMESPACES, ADVICE}
            assert check.found
            assert bool(check.remedy) is not check.ok, check

    def test_the_level_process(self, tmp_path: Path) -> None:
        """It needs neither nsjail nor namespaces, and Landlock."""
        checks = hostcheck.check_host(JailSettings(runtime=tmp_path, level="process"))
        assert {check.level for check in checks} == {"process", ADVICE}
        assert "landlock" in {check.name for check in checks}
        assert not {"nsjail", "namespaces", "mounts"} & {check.name for check in checks}
        assert all(bool(check.remedy) is not check.ok for check in checks)

    def test_a_missing_runtime_is_a_lack(self, tmp_path: Path) -> None:
        """Where nothing was built, the command that builds it is the remedy."""
        checks = {check.name: check for check in hostcheck.check_host(JailSettings(runtime=tmp_path))}
        assert not checks["runtime"].ok
        assert checks["runtime"].remedy == "sandbox runtime build"

    def test_what_the_level_process_lacks(self) -> None:
        """A lack is shown as it is, with its remedy."""
        check = hostcheck.process_walls(("the kernel has no Landlock", "boot another"))
        assert (check.ok, check.found, check.remedy) == (False, "the kernel has no Landlock", "boot another")

    def test_the_bundled_nsjail_starts(self) -> None:
        """The binary that comes with our dependencies runs on this host."""
        assert hostcheck.nsjail().ok

    def test_an_odd_host_does_not_crash_it(self, tmp_path: Path) -> None:
        """A host without any of the files we look at gets answers, too."""
        checks = {
            check.name: check for check in hostcheck.check_host(JailSettings(runtime=tmp_path), root=tmp_path)
        }
        assert not checks["cgroups"].ok
        assert "mountinfo" in checks["cgroups"].found
        assert checks["swap"].ok

    def test_the_trial_leaves_no_trace(self) -> None:
        """What was tried is gone: this process's namespaces and mounts are as they were."""
        spaces = [
            Path(f"/proc/self/ns/{name}") for name in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")
        ]
        before = [path.readlink() for path in spaces], Path("/proc/self/mountinfo").read_text()
        hostcheck.try_walls()
        assert ([path.readlink() for path in spaces], Path("/proc/self/mountinfo").read_text()) == before

    def test_a_refused_namespace_is_named(self) -> None:
        """On a host whose limit on net namespaces is 0, the trial says so and goes no further."""
        trial = Path(hostcheck.__file__).with_name("trial.py")
        limited = f"echo 0 > /proc/sys/user/max_net_namespaces && exec python3 -I -S '{trial}'"
        done = subprocess.run(
            ["unshare", "-r", "sh", "-c", limited], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            pytest.skip(f"no user namespace to try in: {done.stderr.strip()}")
        answers = json.loads(done.stdout)
        assert list(answers)[-1] == "net namespace"
        assert answers["net namespace"]
        refused = [check.name for check in hostcheck.walls(answers) if not check.ok]
        assert refused == ["namespaces", "mounts"]

    @pytest.mark.parametrize(
        ("version", "ok"), [("3.13.0", True), ("3.12.1", True), ("3.11.2", False), ("3.14.0", False)]
    )
    def test_a_dearer_interpreter_is_no_lack(self, version: str, ok: bool) -> None:
        """It works, so what it costs is advice."""
        check = hostcheck.interpreter(version)
        assert (check.ok, check.level) == (ok, ADVICE)
        assert version in check.found


class TestKernel:
    """Version and processor."""

    @pytest.mark.parametrize("release", ["5.10.0-28-amd64", "6.18.44-fc", "6.1+", "10.0.0"])
    def test_new_enough(self, release: str) -> None:
        """5.10 and all above it will do, and numbers are compared as numbers."""
        assert hostcheck.kernel(release).ok

    @pytest.mark.parametrize("release", ["4.18.0-553.el8", "5.9.16", "5.4.0-1100-aws", "unknown"])
    def test_too_old(self, release: str) -> None:
        """An older one, or one that cannot be read, is refused with the version that we want."""
        check = hostcheck.kernel(release)
        assert not check.ok
        assert "5.10" in check.remedy

    def test_processors(self) -> None:
        """Only the two that the filter knows pass."""
        assert [hostcheck.architecture(name).ok for name in ("x86_64", "aarch64", "riscv64")] == [
            True,
            True,
            False,
        ]


class TestUsers:
    """Who may make user namespaces."""

    def test_a_plain_host(self, tmp_path: Path) -> None:
        """Without any of the switches both root and ordinary users may."""
        for is_root in (True, False):
            assert hostcheck.users(proc(tmp_path), JailSettings(), is_root=is_root).ok

    @pytest.mark.parametrize(
        ("switch", "value"),
        [
            ("sys__kernel__unprivileged_userns_clone", "0"),
            ("sys__kernel__apparmor_restrict_unprivileged_userns", "1"),
        ],
    )
    def test_closed_to_ordinary_users(self, tmp_path: Path, switch: str, value: str) -> None:
        """Debian's and Ubuntu's switches stop ordinary users and not root; the remedy names the switch."""
        tree = proc(tmp_path, **{switch: f"{value}\n", "self__uid_map": ALL_IDS, "self__gid_map": ALL_IDS})
        ordinary = hostcheck.users(tree, JailSettings(), is_root=False)
        assert not ordinary.ok
        assert switch.rpartition("__")[2] in ordinary.remedy
        assert hostcheck.users(tree, JailSettings(), is_root=True).ok

    def test_closed_to_all(self, tmp_path: Path) -> None:
        """A limit of 0 user namespaces stops root as well."""
        tree = proc(tmp_path, sys__user__max_user_namespaces="0\n")
        for is_root in (True, False):
            assert not hostcheck.users(tree, JailSettings(), is_root=is_root).ok

    def test_root_of_a_small_container(self, tmp_path: Path) -> None:
        """Root with 65,536 ids only has none for the slots, and is told which setting to change."""
        small = "         0     100000      65536\n"
        check = hostcheck.users(
            proc(tmp_path, self__uid_map=small, self__gid_map=small), JailSettings(), is_root=True
        )
        assert not check.ok
        assert "FIRST_UID" in check.remedy


class TestWalls:
    """What the trial's answers mean."""

    def test_a_masked_proc(self) -> None:
        """A container that hides parts of /proc lacks the mount, not the namespaces."""
        answers = {"seccomp filter": "", "user namespace": "", "pid namespace": "", "tmpfs mount": ""}
        checks = {
            check.name: check
            for check in hostcheck.walls(answers | {"proc mount": "Operation not permitted"})
        }
        assert [check.ok for check in checks.values()] == [True, True, False]
        assert "proc mount: Operation not permitted" in checks["mounts"].found
        assert "systempaths=unconfined" in checks["mounts"].remedy

    def test_no_filters(self) -> None:
        """A kernel without seccomp lacks just that."""
        checks = hostcheck.walls({"seccomp filter": "Invalid argument", "user namespace": ""})
        assert [check.name for check in checks if not check.ok] == ["seccomp"]

    def test_a_trial_that_did_not_run(self) -> None:
        """When the trial itself fails, nothing of it counts as given."""
        assert not any(check.ok for check in hostcheck.walls({"trial": "MemoryError"}))


class TestResources:
    """Memory, processes, swap, compiler."""

    def test_cgroups(self) -> None:
        """v1 and v2 are fine; without either the check says what stands in, and it is advice."""
        assert hostcheck.cgroups(V1).ok
        assert hostcheck.cgroups(V2).ok
        check = hostcheck.cgroups(NONE)
        assert not check.ok
        assert check.level == ADVICE
        assert "no cgroup hierarchy is mounted" in check.found
        assert "stand in" in check.found

    def test_swap(self, tmp_path: Path) -> None:
        """Swap spoils memory limits where there are no cgroups, which keep calls from it."""
        header = "Filename Type Size Used Priority\n"
        without = proc(tmp_path / "a", swaps=header)
        swapping = proc(tmp_path / "b", swaps=header + "/dev/sda2 partition 1048572 0 -2\n")
        assert hostcheck.swap(without, V1).ok
        assert hostcheck.swap(swapping, V1).ok
        assert not hostcheck.swap(swapping, NONE).ok
        assert hostcheck.swap(swapping, V2).ok

    def test_core_dumps(self, tmp_path: Path) -> None:
        """A helper for crashes is named; a file name starts nothing, and dumps are limited to nothing."""
        piped = hostcheck.core_dumps(proc(tmp_path / "a", sys__kernel__core_pattern="|/usr/share/apport %p"))
        assert not piped.ok
        assert "/usr/share/apport" in piped.found
        assert hostcheck.core_dumps(proc(tmp_path / "b", sys__kernel__core_pattern="core")).ok

    def test_no_compiler(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without a compiler and without a runtime, a compiler is what to install first."""
        monkeypatch.setenv("PATH", str(tmp_path))
        check = hostcheck.compiler(tmp_path)
        assert not check.ok
        assert "gcc" in check.remedy
