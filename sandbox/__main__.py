"""`python -m sandbox` is the `sandbox` command."""

from sandbox.cli import main

main()
