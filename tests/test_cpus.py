"""How many CPUs and how much memory this process may use, over files as Linux has them."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest

import prefetchshard as ps
from prefetchshard.base import cpus
from prefetchshard.base.cgroups import MemoryLimit, cpu_limit, memory_limit
from prefetchshard.base.cpus import cpu_affinity, cpu_count, cpu_quota

VERSION_2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
CPU_1 = "31 30 0:27 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
MEMORY_1 = "32 30 0:28 / /sys/fs/cgroup/memory rw shared:10 - cgroup cgroup rw,memory\n"
CPUSET_1 = "33 30 0:29 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"


def files(root: Path, contents: dict[str, str]) -> Path:
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def version_2(root: Path, group: str, contents: dict[str, str]) -> Path:
    """A machine with version 2, a process in `group`, and files below the folder of the groups."""
    below = {f"sys/fs/cgroup/{name}": text for name, text in contents.items()}
    return files(root, {"proc/self/cgroup": f"0::{group}\n", "proc/self/mountinfo": VERSION_2, **below})


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("max 100000", math.inf),
        ("200000 100000\n", 2.0),
        ("150000 100000", 1.5),
        ("5000 100000", 0.05),
        ("", math.inf),
        ("max", math.inf),
        ("200000", math.inf),
        ("200000 0", math.inf),
        ("many 100000", math.inf),
        ("1 2 3", math.inf),
    ],
)
def test_version_2(text: str, want: float, tmp_path: Path) -> None:
    assert cpu_limit(version_2(tmp_path, "/", {"cpu.max": text})) == want


def test_the_smallest_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    limits = {"a/b/c/cpu.max": "max 100000", "a/b/cpu.max": "300000 100000", "a/cpu.max": "800000 100000", "a/other/cpu.max": "1000 100000"}
    assert cpu_limit(version_2(tmp_path, "/a/b/c", limits)) == 3.0


def test_a_container_whose_group_is_all_that_is_mounted(tmp_path: Path) -> None:
    """Without a namespace of its own it sees the path that its group has on the machine, which is not there."""
    mount = "40 30 0:27 /docker/abc /sys/fs/cgroup/cpu,cpuacct ro master:9 - cgroup cgroup rw,cpu,cpuacct\n"
    contents = {
        "proc/self/cgroup": "12:cpuset:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/docker/abc\n",
        "proc/self/mountinfo": CPUSET_1 + mount,
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "250000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpuset/cpu.cfs_quota_us": "1\n",
        "sys/fs/cgroup/cpuset/cpu.cfs_period_us": "100000\n",
    }
    assert cpu_limit(files(tmp_path, contents)) == 2.5


@pytest.mark.parametrize("group", ["/../elsewhere", "/not/there", "/"])
def test_a_group_that_cannot_be_found_leaves_those_around_it(group: str, tmp_path: Path) -> None:
    assert cpu_limit(version_2(tmp_path, group, {"cpu.max": "400000 100000"})) == 4.0


@pytest.mark.parametrize(("quota", "want"), [("-1", math.inf), ("50000", 0.5), ("0", math.inf), ("x", math.inf)])
def test_version_1(quota: str, want: float, tmp_path: Path) -> None:
    contents = {
        "proc/self/cgroup": "4:cpu,cpuacct:/slice/job\n0::/slice/job\n",
        "proc/self/mountinfo": CPU_1 + VERSION_2,
        "sys/fs/cgroup/cpu,cpuacct/slice/job/cpu.cfs_quota_us": quota,
        "sys/fs/cgroup/cpu,cpuacct/slice/job/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
    }
    assert cpu_limit(files(tmp_path, contents)) == want


def test_a_folder_with_a_space(tmp_path: Path) -> None:
    contents = {
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": "30 23 0:26 / /my\\040groups rw - cgroup2 cgroup2 rw\n",
        "my groups/cpu.max": "700000 100000",
    }
    assert cpu_limit(files(tmp_path, contents)) == 7.0


@pytest.mark.parametrize(
    "contents",
    [
        {},
        {"proc/self/cgroup": "0::/\n"},
        {"proc/self/cgroup": "nonsense\n\n0::/\n", "proc/self/mountinfo": "nonsense\n1 2 3 - cgroup2\n - \n"},
    ],
)
def test_where_no_file_says_anything_there_is_no_limit(contents: dict[str, str], tmp_path: Path) -> None:
    files(tmp_path, contents)
    assert cpu_limit(tmp_path) == math.inf
    assert memory_limit(tmp_path) is None


def test_the_quota_is_the_least_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    version_2(tmp_path, "/", {"cpu.max": "250000 100000"})
    assert cpu_quota(tmp_path) == 2.5
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5}, raising=False)
    assert cpu_quota(tmp_path) == 2.0
    assert cpu_quota(tmp_path / "nothing") == 2.0


@pytest.mark.parametrize(("quota", "want"), [(0.05, 1), (1.0, 1), (1.01, 2), (2.5, 3), (64.0, 64)])
def test_threads_are_rounded_up(quota: float, want: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpus, "cpu_limit", lambda root: quota)
    monkeypatch.setattr(cpus, "cpu_affinity", lambda: 64)
    assert cpu_count() == want


def test_a_system_without_affinity_and_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    assert (cpu_affinity(), cpu_quota(tmp_path)) == (10, 10.0)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert (cpu_affinity(), cpu_quota(tmp_path)) == (1, 1.0)


def test_a_loader_has_no_more_threads_than_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpus, "cpu_limit", lambda root: 2.5)
    monkeypatch.setattr(cpus, "cpu_affinity", lambda: 64)
    with ps.Loader(np.zeros((64, 4)), batch_size=8) as loader:
        batches = iter(loader)
        next(batches)
        assert batches.stats().workers == 3


# -- memory


def test_memory_of_version_2(tmp_path: Path) -> None:
    limits = {"a/memory.max": "8000", "a/memory.current": "5000", "a/memory.stat": "anon 1\ninactive_file 1500\nactive_file 7\n"}
    assert memory_limit(version_2(tmp_path, "/a", limits)) == MemoryLimit(8000, 4500)


def test_the_group_with_the_least_left_counts(tmp_path: Path) -> None:
    limits = {"a/memory.max": "8000", "a/memory.current": "1000", "memory.max": "9000", "memory.current": "7000"}
    assert memory_limit(version_2(tmp_path, "/a", limits)) == MemoryLimit(9000, 2000)


def test_what_is_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    assert memory_limit(version_2(tmp_path, "/", {"memory.max": "10", "memory.current": "12"})) == MemoryLimit(10, 0)


@pytest.mark.parametrize("limit", ["max", "9223372036854771712", "", "x"])
def test_no_limit_on_memory(limit: str, tmp_path: Path) -> None:
    assert memory_limit(version_2(tmp_path, "/", {"memory.max": limit, "memory.current": "5"})) is None


def test_memory_of_version_1(tmp_path: Path) -> None:
    contents = {
        "proc/self/cgroup": "9:memory:/job\n0::/\n",
        "proc/self/mountinfo": MEMORY_1 + VERSION_2,
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "4000\n",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "3000\n",
        "sys/fs/cgroup/memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 500\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "123456\n",
    }
    assert memory_limit(files(tmp_path, contents)) == MemoryLimit(4000, 1500)
