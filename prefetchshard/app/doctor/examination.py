"""Looks at the machine, part by part; a part that fails leaves the others as they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from prefetchshard.app.doctor import facts
from prefetchshard.app.doctor.advice import NOTHING, advice, suggestions
from prefetchshard.app.doctor.facts import Failed, attempt, known
from prefetchshard.app.doctor.measurements import measure_bus, measure_copies, measure_small_puts
from prefetchshard.app.doctor.report import Findings, Report
from prefetchshard.base.cgroups import ROOT
from prefetchshard.base.clock import MONOTONIC, Clock
from prefetchshard.sharding.rules import resolve
from prefetchshard.staging.pinned import choose_staging
from prefetchshard.streaming.copies import find_streaming

RING_SLOTS = 2
DEVICES, STAGING, COPIES, CPUS = "the devices", "the staging memory", "the copies past the cache", "the CPUs"

Progress = Callable[[str], object]
"""Told what is looked at next."""


def examine(clock: Clock = MONOTONIC, tell: Progress = lambda what: None, root: Path = ROOT) -> Report:
    """Find out what a user of the loader must know of this machine. Takes some seconds.

    Args:
        clock: monotonic seconds, for all that is measured here.
        tell: told what is looked at next.
        root: of the file system that tells quotas, memory and devices.
    """
    began = clock()
    findings = find_out(clock, tell, root)
    found = advice(findings)
    return Report(
        verdict=found[0] if found else NOTHING,
        advice=found,
        findings=findings,
        suggestions=suggestions(findings),
        took_seconds=clock() - began,
    )


def find_out(clock: Clock, tell: Progress, root: Path) -> Findings:
    """Look things up, and measure. The arguments are those of `examine`."""
    cpus = attempt(lambda: facts.cpus(root))
    memory = attempt(lambda: facts.host_memory(root))
    available = None if isinstance(memory, Failed) else memory.available_bytes
    tell("starting JAX")
    found = attempt(facts.jax_devices)
    rules = attempt(lambda: resolve(None)) if not isinstance(found, Failed) else found
    tell("looking for page-locked memory, and for copies past the cache")
    staging = attempt(lambda: choose_staging(known(found, DEVICES)[0], RING_SLOTS))
    streaming = attempt(lambda: find_streaming(are_read=isinstance(found, Failed) or found[0].platform == "cpu"))
    ways = attempt(lambda: facts.ways(known(found, DEVICES)[0], known(staging), known(streaming)))
    tell("measuring transfers")
    bus = attempt(lambda: measure_bus(known(found, DEVICES), known(staging, STAGING), clock, available))
    small_puts = attempt(lambda: measure_small_puts(known(rules, DEVICES), known(staging, STAGING), clock))
    tell("measuring copies on the host")
    copies = attempt(lambda: measure_copies(known(streaming, COPIES), math.ceil(known(cpus, CPUS).usable), clock, available))
    return Findings(
        versions=attempt(facts.versions),
        interpreter=attempt(facts.interpreter),
        cpus=cpus,
        memory=memory,
        devices=found if isinstance(found, Failed) else attempt(lambda: facts.devices(found, known(rules), root)),
        ways=ways,
        bus=bus,
        small_puts=small_puts,
        copies=copies,
    )
