"""The command `sandbox`, as a process, against a gateway that does what each test wants."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import shlex
import signal
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import sandbox
from sandbox import CallStatus, InvalidCall, SandboxError, ToolCall, ToolResult, Unavailable
from sandbox.api_keys import digest_of
from sandbox.cli import show
from sandbox.errors import CallTooLarge, Forbidden, Unauthorized
from sandbox.jail.hostcheck import check_host
from sandbox.jail.selftest import WALLS
from sandbox.jsonl import _WINDOW, run_in_order
from sandbox.settings import load_settings

from .fake_gateway import FakeGateway, Request, result


@dataclass
class Ended:
    """What a command left."""

    code: int | None
    out: str
    err: str


async def command(*words: str | Path, stdin: bytes = b"", **variables: str | Path) -> Ended:
    """Run `python -m sandbox` with these words to its end."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SANDBOX_")}  # noqa: TID251
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "sandbox", *words, env=environ | variables,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate(stdin)
    return Ended(process.returncode, out.decode(), err.decode())


async def test_run_ends_as_the_program_ended() -> None:
    """Stdout, stderr and the exit code are the program's, in any locale."""

    async def answer(request: Request) -> None:
        fields = {"status": "error", "exit_code": 3, "stdout": "out é\n", "stderr": "err"}
        await request.line(0, result(request.calls[0], **fields))
        await request.end()

    async with FakeGateway(answer) as gateway:
        ended = await command("run", "-c", "whatever", "--url", gateway.url, PYTHONIOENCODING="ascii")
    assert (ended.code, ended.out, ended.err) == (3, "out é\n", "err")


async def test_run_sends_what_was_asked_for(tmp_path: Path) -> None:
    """The file's text, its stdin, its limits and nothing that was left out."""
    program = tmp_path / "program.py"
    program.write_text("print('é')")
    words = ["--stdin", "-", "--wall", "2", "--memory", "64", "--echo", "--loopback"]
    async with FakeGateway() as gateway:
        await command("run", program, *words, "--url", gateway.url, stdin=b"to read")
        await command("run", "-", "--url", gateway.url, stdin=b"print(2)")
    first, second = (request.calls[0] for request in gateway.requests)
    assert {name: value for name, value in first.items() if name != "id"} == {
        "code": "print('é')",
        "stdin": "to read",
        "limits": {"wall_s": 2.0, "memory_bytes": 64 * 1024 * 1024},
        "network": "loopback",
        "echo_last_value": True,
    }
    assert (second["code"], second["limits"]) == ("print(2)", {})


async def test_run_can_print_the_result_as_json() -> None:
    """With --json stdout is one ToolResult, and the exit code is still the program's."""
    async with FakeGateway() as gateway:
        ended = await command("run", "-c", "1", "--json", "--url", gateway.url)
    assert ToolResult.model_validate_json(ended.out).stdout == "1"
    assert (ended.code, ended.err) == (0, "")


async def test_run_without_a_service_says_so_in_one_line() -> None:
    """Exit code 125, where the gateway was looked for, and no traceback."""
    ended = await command("run", "-c", "1", "--url", "http://127.0.0.1:1")
    assert (ended.code, ended.out) == (125, "")
    assert ended.err.startswith("sandbox: Unavailable: cannot connect to http://127.0.0.1:1: ")
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run"], "give a FILE or -c CODE"),
        (["run", "x.py", "-c", "1"], "give a FILE or -c CODE"),
        (["run", "/nowhere.py"], "cannot read /nowhere.py"),
    ],
)
async def test_run_without_one_program_is_misuse(words: list[str], message: str) -> None:
    """No program, two programs or a file that is not there: exit code 2."""
    ended = await command(*words, TERMINAL_WIDTH="200")
    assert ended.code == 2
    assert message in ended.err


@pytest.mark.parametrize(
    ("fields", "code", "word"),
    [
        ({"status": "ok", "exit_code": 0}, 0, ""),
        ({"status": "error", "exit_code": 1}, 1, ""),
        ({"status": "error"}, 1, ""),
        ({"status": "signaled", "signal": 11}, 139, "signaled: the program was ended by signal 11"),
        ({"status": "timeout", "signal": 9, "usage": {"wall_s": 2, "cpu_s": 1}}, 124, "timeout: stopped after 2.00 s"),
        ({"status": "memory_limit", "usage": {"memory_peak_bytes": 5 << 20}}, 123, "memory_limit: stopped at 5 MiB"),
        ({"status": "output_limit"}, 122, "output_limit: stopped at its limit"),
        ({"status": "queue_timeout", "reason": "too late"}, 125, "queue_timeout: too late"),
        ({"status": "internal_error"}, 125, "internal_error: the service failed"),
    ],
)  # fmt: skip
def test_each_status_has_its_exit_code(
    fields: dict[str, Any], code: int, word: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The code tells verdicts and faults apart, and one line on stderr says why it is not the program's own."""
    assert show(ToolResult.model_validate({"id": "a", **fields}), as_json=False) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"sandbox: {word}" if word else "")
    assert err.count("\n") == bool(word)


def test_every_status_is_in_that_table() -> None:
    """A status that is added later is not forgotten there."""
    [table] = test_each_status_has_its_exit_code.pytestmark
    assert {fields["status"] for fields, _, _ in table.args[1]} == set(CallStatus)


def test_an_error_is_json_too_when_asked(capfd: pytest.CaptureFixture[str]) -> None:
    """A program that reads --json gets the error in the gateway's words."""
    assert show(InvalidCall("code: bad"), as_json=True) == 2
    out, err = capfd.readouterr()
    assert json.loads(out) == {"error": {"name": "InvalidCall", "message": "code: bad"}}
    assert err == "sandbox: InvalidCall: code: bad\n"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (InvalidCall("limits.wall_s: 100 is above"), 2, "InvalidCall: --wall: 100 is above"),
        (InvalidCall("limits.memory_bytes: too few"), 2, "InvalidCall: --memory, in bytes: too few"),
        (CallTooLarge("the body is over 9 bytes"), 2, "CallTooLarge: the body is over 9 bytes"),
        (Unauthorized("this needs an API key"), 2, "Unauthorized: this needs an API key"),
        (Forbidden("the scope 'run'"), 2, "Forbidden: the scope 'run'"),
        (Unavailable("nobody there: no"), 125, "Unavailable: nobody there: no"),
    ],
)
def test_what_the_caller_did_wrong_is_no_fault_of_the_service(
    error: SandboxError, code: int, line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A call that is refused is misuse, told in the words of the options; 125 is left to the service."""
    assert show(error, as_json=False) == code
    assert capfd.readouterr().err == f"sandbox: {line}\n"


async def test_a_limit_below_the_least_is_misuse() -> None:
    """It is refused before anything is sent, with the option's name."""
    ended = await command("run", "-c", "1", "--memory", "1")
    assert ended.code == 2
    assert ended.err.startswith("sandbox: InvalidCall: --memory, in bytes: ")


def lines(path: Path, *calls: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(call) + "\n" for call in calls))
    return path


async def test_map_answers_each_line_in_order(tmp_path: Path) -> None:
    """Results and errors stand at the places of their calls; without a verdict for all, the exit code is 1."""

    async def answer(request: Request) -> None:
        for index, call in reversed(list(enumerate(request.calls))):
            error = {"error": {"name": "InvalidCall", "message": "code: bad"}}
            await request.line(index, error if call["code"] == "bad" else result(call))
        await request.end()

    good = [{"id": str(n), "code": f"print({n})"} for n in range(5)]
    calls = lines(tmp_path / "calls.jsonl", *good[:3], {"id": "x", "code": "bad"}, *good[3:])
    async with FakeGateway(answer) as gateway:
        ended = await command("map", calls, "--url", gateway.url)
        to_file = await command("map", calls, "-o", tmp_path / "out.jsonl", "--url", gateway.url)

    answers = [json.loads(line) for line in ended.out.splitlines()]
    assert [answer["id"] for answer in answers] == ["0", "1", "2", "x", "3", "4"]
    assert answers[3]["error"]["message"] == "code: bad"
    assert ToolResult.model_validate(answers[5]).stdout == "print(4)"
    assert (ended.code, to_file.code) == (1, 1)
    assert "5 ok, 1 InvalidCall" in ended.err
    assert (to_file.out, (tmp_path / "out.jsonl").read_text()) == ("", ended.out)


async def test_map_checks_all_lines_before_it_sends_any(tmp_path: Path) -> None:
    """A line that is no call is named by its number, and nothing has been run."""
    calls = lines(tmp_path / "calls.jsonl", {"code": "1"}, {"code": "2", "answer": 3})
    async with FakeGateway() as gateway:
        ended = await command("map", calls, "--url", gateway.url)
    assert ended.code == 1
    assert ended.err == f"sandbox: {calls}:2: answer: Extra inputs are not permitted\n"
    assert gateway.requests == []


@pytest.mark.parametrize("line", ["{", "[1]", '{"id": "a"}'])
@pytest.mark.parametrize("options", [[], ["--lenient"]])
async def test_map_refuses_what_is_no_call(tmp_path: Path, line: str, options: list[str]) -> None:
    """Broken JSON, no object, and an object without code are refused, leniently or not."""
    calls = tmp_path / "calls.jsonl"
    calls.write_text(f"\n{line}\n")
    ended = await command("map", calls, *options)
    assert ended.code == 1
    assert ended.err.startswith(f"sandbox: {calls}:2: ")
    assert ended.err.count("\n") == 1


async def test_map_can_ignore_fields_of_others(tmp_path: Path) -> None:
    """With --lenient a file of programs with answers beside them is run as it is; blank lines do not count."""
    calls = lines(tmp_path / "calls.jsonl", {"id": "a/0", "code": "1", "stdout": "1", "answer": "1"})
    async with FakeGateway() as gateway:
        ended = await command("map", calls, "--lenient", "--url", gateway.url)
    assert ended.code == 0
    assert [call for request in gateway.requests for call in request.calls] == [{"id": "a/0", "code": "1"}]


async def test_map_needs_a_service_and_a_file(tmp_path: Path) -> None:
    """Where either is missing there is one line, at once."""
    calls = lines(tmp_path / "calls.jsonl", {"code": "1"})
    nobody = await command("map", calls, "--url", "http://127.0.0.1:1")
    nothing = await command("map", "/nowhere.jsonl")
    assert nobody.code == nothing.code == 1
    assert "sandbox: http://127.0.0.1:1 does not answer" in nobody.err
    assert nothing.err == "sandbox: cannot read /nowhere.jsonl: No such file or directory\n"


async def test_map_keeps_what_there_was_until_it_has_all(tmp_path: Path) -> None:
    """Without a service an older output stays; with one it is replaced, also where a link leads to it."""
    calls = lines(tmp_path / "calls.jsonl", {"code": "1"})
    older = lines(tmp_path / "older.jsonl", {"precious": 1})
    before = older.read_bytes()
    link = tmp_path / "link"
    link.symlink_to(older)
    nobody = await command("map", calls, "-o", link, "--url", "http://127.0.0.1:1")
    assert (nobody.code, older.read_bytes()) == (1, before)
    assert "so far" not in nobody.err
    async with FakeGateway() as gateway:
        ended = await command("map", calls, "-o", link, "--url", gateway.url)
    assert (ended.code, link.is_symlink()) == (0, True)
    assert ToolResult.model_validate_json(older.read_text()).stdout == "1"
    assert sorted(os.listdir(tmp_path)) == ["calls.jsonl", "link", "older.jsonl"]  # noqa: PTH208


async def test_map_does_not_write_over_its_calls(tmp_path: Path) -> None:
    """The file of calls is refused as output, by any name, and also where the unfinished output would lie."""
    calls = lines(tmp_path / "calls.jsonl.part", {"code": "1"})
    before = calls.read_bytes()
    (tmp_path / "link").symlink_to(calls)
    for output in (calls, tmp_path / "link", tmp_path / "calls.jsonl"):
        ended = await command("map", calls, "-o", output)
        assert (ended.code, calls.read_bytes()) == (1, before)
        assert "would overwrite the calls" in ended.err
        assert ended.err.count("\n") == 1


async def test_map_says_that_it_cannot_write(tmp_path: Path) -> None:
    """A folder that is not there and a full device are one line each, and exit code 1."""
    calls = lines(tmp_path / "calls.jsonl", {"code": "1"})
    async with FakeGateway() as gateway:
        nowhere = await command("map", calls, "-o", "/nowhere/x", "--url", gateway.url)
        full = await command("map", calls, "-o", "/dev/full", "--url", gateway.url)
        words = f"{shlex.join([sys.executable, '-m', 'sandbox', 'map', str(calls), '--url', gateway.url])} >/dev/full"
        shell = await asyncio.create_subprocess_shell(words, stderr=asyncio.subprocess.PIPE)
        _, err = await shell.communicate()
    last = [nowhere.err, full.err, err.decode()]
    assert [text.splitlines()[-1] for text in last] == [
        "sandbox: cannot write /nowhere/x: No such file or directory",
        "sandbox: cannot write /dev/full: No space left on device",
        "sandbox: cannot write to stdout: No space left on device",
    ]
    assert (nowhere.code, full.code, shell.returncode) == (1, 1, 1)
    assert "Traceback" not in "".join(last)


async def test_map_keeps_what_was_done_when_interrupted(tmp_path: Path) -> None:
    """Ctrl-C ends it with 130, says where the answers so far are, and counts no cancelled call as done."""
    calls = lines(
        tmp_path / "calls.jsonl", {"id": "a", "code": "1"}, {"id": "b", "code": "hold"}, {"code": "hold"}
    )

    async def answer(request: Request) -> None:
        for index, call in enumerate(request.calls):
            if call["code"] != "hold":
                await request.line(index, result(call, stdout="x" * 100_000))
        await asyncio.Event().wait()

    async with FakeGateway(answer) as gateway:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "sandbox", "map", calls, "-o", tmp_path / "out", "--url", gateway.url,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        part = tmp_path / "out.part"
        while not (part.exists() and part.stat().st_size):  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # nothing tells us that a file grew
        assert process.stderr is not None
        process.send_signal(signal.SIGINT)
        err = (await process.stderr.read()).decode()
        code = await process.wait()
    assert code == 130
    assert f"sandbox: the answers so far are in {tmp_path}/out.part" in err
    assert "1/3" in err
    assert not (tmp_path / "out").exists()


async def test_map_holds_a_bounded_number_of_calls() -> None:
    """Lines are read as answers are written, however slow the first call is."""
    read = written = 0
    first_may_end = asyncio.Event()

    def calls() -> Iterator[ToolCall]:
        nonlocal read
        for n in range(3 * _WINDOW):
            read += 1
            assert read - written <= _WINDOW + 1
            if read == _WINDOW + 1:
                first_may_end.set()
            yield ToolCall(id=str(n), code="1")

    async def answer(request: Request) -> None:
        for index, call in enumerate(request.calls):
            if call["id"] != "0":
                await request.line(index, result(call))
        if [call for call in request.calls if call["id"] == "0"]:
            await first_may_end.wait()
            await request.line(0, result(request.calls[0]))
        await request.end()

    def write(call: ToolCall, answer: ToolResult | SandboxError) -> None:
        nonlocal written
        assert (call.id, isinstance(answer, ToolResult)) == (str(written), True)
        written += 1

    async with FakeGateway(answer) as gateway:
        await run_in_order(gateway.url, calls(), write, lambda: None)
    assert written == 3 * _WINDOW


async def test_doctor_shows_every_check_and_says_whether_the_level_is_given() -> None:
    """The table has what `check_host` found, and the exit code is 1 if the configured level lacks something."""
    jail = load_settings({}).jail
    checks = await asyncio.to_thread(check_host, jail)
    ended = await command("doctor")
    assert [check.name for check in checks if check.name not in ended.out] == []
    assert ended.code == int(any(not check.ok and check.level == jail.level for check in checks))
    walls = [wall.name for wall in WALLS if jail.level in wall.levels]
    assert ([wall for wall in walls if wall not in ended.out] == []) == (ended.code == 0)


async def test_doctor_keeps_each_check_on_one_line_of_a_pipe(tmp_path: Path) -> None:
    """A path with spaces, however long, can be found by a program that reads the output."""
    missing = tmp_path / "no such" / "runtime here" / ("x" * 100)
    ended = await command("doctor", SANDBOX_JAIL__RUNTIME=missing)
    assert f"there is no runtime environment at {missing}; run `sandbox runtime build`" in ended.out
    assert (ended.code, "wall holds" in ended.out) == (1, False)


async def test_runtime_build_says_what_it_lacks_in_one_line(tmp_path: Path) -> None:
    """A ConfigError of the builder reaches the person as a sentence."""
    words = ["runtime", "build", "--python", tmp_path / "no-python"]
    ended = await command(*words, SANDBOX_JAIL__RUNTIME=tmp_path / "runtime")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith("sandbox: ")
    assert "Traceback" not in ended.err


async def test_the_gateway_gets_all_words_that_follow(tmp_path: Path) -> None:
    """`sandbox gateway` is `python -m gateway` with the same options, also --help, and ends as it ends."""
    (tmp_path / "gateway.py").write_text("import sys; print(sys.argv[1:]); sys.exit(5)")
    ended = await command("gateway", "--fd", "7", "--help", PYTHONPATH=tmp_path)
    assert (ended.code, ended.out) == (5, "['--fd', '7', '--help']\n")


async def test_the_worker_has_no_options(tmp_path: Path) -> None:
    """`sandbox worker` is `python -m worker` and ends as it ends; --help says what it does, and more is misuse."""
    (tmp_path / "worker.py").write_text("import sys; print(sys.argv[1:]); sys.exit(5)")
    ended = await command("worker", PYTHONPATH=tmp_path)
    assert (ended.code, ended.out) == (5, "[]\n")
    helped = await command("worker", "--help", PYTHONPATH=tmp_path)
    assert (helped.code, "REDIS_URL says where the calls are" in helped.out) == (0, True)
    assert (await command("worker", "--fd", "7", PYTHONPATH=tmp_path)).code == 2


async def test_help_shows_defaults_plainly() -> None:
    """A default that the settings hold reads like one that the command line holds."""
    ended = await command("up", "--help", COLUMNS="200")
    assert "[default: 8000]" in ended.out
    assert "[default: four for each core]" in ended.out


async def test_an_unknown_setting_stops_the_start() -> None:
    """The error of the settings is one line and exit code 1."""
    ended = await command("up", SANDBOX_GATEWAY__PROT="8000")
    assert ended.code == 1
    assert ended.err.startswith("sandbox: the variable SANDBOX_GATEWAY__PROT is no setting of ours.")
    assert "SANDBOX_GATEWAY__PORT" in ended.err
    assert ended.err.count("\n") == 1


async def test_version_is_the_distribution_s() -> None:
    """`sandbox version` prints what pip knows."""
    ended = await command("version")
    assert (ended.code, ended.out) == (0, importlib.metadata.version("roc-sandbox") + "\n")


def link_base_install(target: Path) -> None:
    """Fill a folder with what `pip install roc-sandbox` brings without an extra, and nothing else."""
    target.joinpath("sandbox").symlink_to(Path(sandbox.__file__).parent)
    waiting, known = ["roc-sandbox"], {"roc-sandbox"}
    while waiting:
        distribution = importlib.metadata.distribution(waiting.pop())
        for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            if not (target / top).exists():
                (target / top).symlink_to(Path(str(distribution.locate_file(top))))
        for requirement in map(Requirement, distribution.requires or []):
            if requirement.name not in known and (
                not requirement.marker or requirement.marker.evaluate({"extra": ""})
            ):
                known.add(requirement.name)
                waiting.append(requirement.name)


async def test_the_base_install_is_enough_for_a_client(tmp_path: Path) -> None:
    """Without [server] the client and `sandbox run` work, and `sandbox up` names what to install."""
    link_base_install(tmp_path)

    async def base(*words: str) -> Ended:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-S", "-m", "sandbox", *words, env={"PYTHONPATH": str(tmp_path)},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await process.communicate()
        return Ended(process.returncode, out.decode(), err.decode())

    async with FakeGateway() as gateway:
        ran = await base("run", "-c", "hello", "--url", gateway.url)
    refused = await base("up")
    assert ran == Ended(0, "hello", "")
    assert refused == Ended(
        1,
        "",
        "sandbox: `sandbox up` needs fastapi, redis, uvicorn; pip install '.[server]' in the project's folder brings all of it\n",
    )


async def test_map_refuses_what_it_cannot_read_twice(tmp_path: Path) -> None:
    """A pipe of calls is refused before any is sent; a second reading would find nothing."""
    os.mkfifo(tmp_path / "pipe")
    ended = await command("map", tmp_path / "pipe")
    assert (ended.code, ended.out) == (1, "")
    assert "is no regular file" in ended.err


async def test_run_and_map_show_the_key_of_the_environment(tmp_path: Path) -> None:
    """SANDBOX_API_KEY goes into every request, and nowhere else; without one there is no such header."""
    calls = tmp_path / "calls.jsonl"
    calls.write_text('{"code": "1"}\n')
    async with FakeGateway() as gateway:
        ran = await command("run", "-c", "1", "--url", gateway.url, SANDBOX_API_KEY="rsk_secret")
        mapped = await command("map", calls, "--url", gateway.url, SANDBOX_API_KEY="rsk_secret")
        await command("run", "-c", "1", "--url", gateway.url, SANDBOX_API_KEY="")
    *with_key, without = gateway.requests
    assert [request.headers["authorization"] for request in with_key] == ["Bearer rsk_secret"] * 2
    assert "authorization" not in without.headers
    assert "rsk_secret" not in ran.out + ran.err + mapped.out + mapped.err


async def test_keys_new_prints_a_key_and_its_stanza() -> None:
    """The key on the first line, then TOML that has its digest and not itself, and nothing on stderr."""
    ended = await command("keys", "new", "--tenant", "team-a", "--scope", "run", "--scope", "admin")
    key, _, rest = ended.out.partition("\n")
    assert (ended.code, ended.err) == (0, "")
    assert tomllib.loads(rest) == {
        "keys": [{"sha256": digest_of(key.encode()).hex(), "tenant": "team-a", "scopes": ["run", "admin"]}]
    }
    plain = await command("keys", "new", "--tenant", "team-a")
    assert 'scopes = ["run"]' in plain.out
    assert key not in plain.out + rest


@pytest.mark.parametrize(
    "words", [["--tenant", "Team"], ["--tenant", ""], ["--tenant", "a", "--scope", "root"]]
)
async def test_keys_new_refuses_what_no_gateway_would_read(words: list[str]) -> None:
    """A name or a scope that would break the file is misuse, and no key is made."""
    ended = await command("keys", "new", *words)
    assert (ended.code, ended.out) == (2, "")
