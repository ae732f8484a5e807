"""`python -m loadtest.locustfiles [OPTIONS OF LOCUST]`: locust against a service that is started for it, and stopped.

Without options it serves locust's web page on this machine, with all scenarios and shapes to choose from.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from loadtest.stack import own_stack
from sandbox import ConfigError

_HERE = Path(__file__).parent
_WEB = ["-f", str(_HERE), "--class-picker", "--web-host", "127.0.0.1"]
_STOP_S = "60"  # users finish what they are in the middle of, so that a run leaves nothing behind


def main(arguments: list[str]) -> int:
    """Run locust. Its exit code, which is 1 when anything failed."""
    given = arguments or _WEB
    if "-f" not in given and "--locustfile" not in given:
        given = ["-f", str(_HERE / "scenarios.py"), *given]
    try:
        with own_stack() as stack:
            return _run(["--host", stack.url, "--stop-timeout", _STOP_S, *given])
    except ConfigError as exc:
        print(exc.message, file=sys.stderr)
        return 1


def _run(arguments: list[str]) -> int:
    with subprocess.Popen([sys.executable, "-m", "locust", *arguments]) as locust:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches locust as well, which then sums up
        try:
            return locust.wait()
        finally:
            locust.terminate()  # when we are told to end


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
