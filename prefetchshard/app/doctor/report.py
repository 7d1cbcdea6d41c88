"""All that was found out, as one value. As JSON it has the same names."""

from __future__ import annotations

import msgspec

from prefetchshard.app.doctor.facts import Cpus, Devices, Failed, HostMemory, Interpreter, Versions, Ways
from prefetchshard.app.doctor.measurements import Bus, HostCopies, SmallPut


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """What was looked up and measured; `Failed` in the place of what could not be.

    Attributes:
        versions: of the packages.
        interpreter: how threads share it.
        cpus: how many, and how many of them for this process.
        memory: of the host.
        devices: that JAX found.
        ways: how batches go there.
        bus: what gets there.
        small_puts: what a put of small leaves costs, by their number.
        copies: what threads copy on the host.
    """

    versions: Versions | Failed
    interpreter: Interpreter | Failed
    cpus: Cpus | Failed
    memory: HostMemory | Failed
    devices: Devices | Failed
    ways: Ways | Failed
    bus: Bus | Failed
    small_puts: tuple[SmallPut, ...] | Failed
    copies: HostCopies | Failed


class Suggestion(msgspec.Struct, frozen=True):
    """Arguments of a loader to begin with.

    Attributes:
        source: for which kind of source.
        workers: how many.
        in_processes: as `ps.Processes(workers)`; else threads.
        depth: batches ready on the devices.
        reason: in a few words.
    """

    source: str
    workers: int
    in_processes: bool
    depth: int
    reason: str

    def __str__(self) -> str:
        """As arguments are written."""
        return f"workers={f'ps.Processes({self.workers})' if self.in_processes else self.workers}, depth={self.depth}"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `doctor` says.

    Attributes:
        verdict: in one sentence.
        advice: what could be mended on this machine, what matters most first; its first sentence is the verdict.
        findings: what that follows from.
        suggestions: for each kind of source.
        took_seconds: to find all of it out.
    """

    verdict: str
    advice: tuple[str, ...]
    findings: Findings
    suggestions: tuple[Suggestion, ...]
    took_seconds: float
