"""Time as an argument, so that tests own it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

Clock: TypeAlias = Callable[[], float]
"""Monotonic seconds; only differences mean anything."""

MONOTONIC: Clock = time.perf_counter
