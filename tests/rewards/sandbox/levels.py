"""A sandbox of every isolation level that this machine has, started once for all tests of sandbox and graders."""

from dataclasses import replace

from oncurve.rewards.sandbox.sandbox import Level, Limits, Sandbox, build_sandbox

LEVELS: tuple[Level, ...] = ("bubblewrap", "seccomp")
BUILT = {level: build_sandbox(level, 1) for level in LEVELS}
SANDBOXES: dict[str, Sandbox] = {level: sandbox for level, (sandbox, _) in BUILT.items() if sandbox is not None}
QUICK = Limits(seconds=4.0, memory=300 << 20, output=64 << 10, file_size=1 << 20)
PATIENT = replace(QUICK, seconds=60.0)
"""For programs that end by themselves, on a busy machine too."""
