from pathlib import Path

import pytest

from memfit.core.units import GIB, MIB
from memfit.processes.cgroups import ControlGroups, Room

UNLIMITED = 9223372036854771712
MOUNT_1 = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
MOUNT_2 = "41 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
MEMINFO = "MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable: 4194304 kB\nHugePages_Total: 0\n"


@pytest.fixture
def tree(tmp_path):
    def build(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(text))
        return ControlGroups(tmp_path)

    return build


def legacy(limit, used, *, cache=0, kills=0, stated=UNLIMITED):
    return {
        "memory.limit_in_bytes": limit,
        "memory.usage_in_bytes": used,
        "memory.stat": f"cache {cache}\nhierarchical_memory_limit {stated}\ntotal_inactive_file {cache}\n"
        "total_active_file 0\n",
        "memory.oom_control": f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n",
    }


def unified(limit, used, *, cache=0, kills=0):
    return {
        "memory.max": limit,
        "memory.current": used,
        "memory.stat": f"anon 5\ninactive_file {cache}\nactive_file 0\nslab_reclaimable 0\n",
        "memory.events": f"low 0\noom 3\noom_kill {kills}\n",
    }


def placed(folder, files):
    return {f"{folder}/{name}": text for name, text in files.items()}


def version_1(**levels):
    files = {"proc/self/cgroup": "4:memory:/jobs/ours\n0::/\n", "proc/self/mountinfo": MOUNT_1}
    for name, figures in levels.items():
        folder = {"top": "", "jobs": "/jobs", "ours": "/jobs/ours"}[name]
        files |= placed(f"sys/fs/cgroup/memory{folder}", figures)
    return files


def version_2(**levels):
    files = {"proc/self/cgroup": "0::/jobs/ours\n", "proc/self/mountinfo": MOUNT_2}
    for name, figures in levels.items():
        files |= placed(f"sys/fs/cgroup{ {'jobs': '/jobs', 'ours': '/jobs/ours'}[name] }", figures)
    return files


def test_the_page_cache_is_not_use(tree):
    # GIVEN a container that is full, most of it with pages of files
    groups = tree(version_1(ours=legacy(600 * MIB, 600 * MIB, cache=589 * MIB)))

    assert groups.used_bytes() == 11 * MIB
    assert groups.room() == Room(589 * MIB, 600 * MIB, 11 * MIB, "container")


def test_the_tightest_level_counts(tree):
    # GIVEN a group with a limit of its own in one with less left
    groups = tree(version_1(ours=legacy(2 * GIB, GIB), jobs=legacy(4 * GIB, 4 * GIB - 100 * MIB)))

    assert groups.room().free_bytes == 100 * MIB
    assert groups.room().limit_bytes == 4 * GIB


def test_a_limit_above_what_is_mounted_counts(tree):
    groups = tree(version_1(ours=legacy(UNLIMITED, 100 * MIB, stated=500 * MIB)))

    assert groups.room() == Room(400 * MIB, 500 * MIB, 100 * MIB, "container")


def test_version_2(tree):
    groups = tree(version_2(ours=unified("max", 300 * MIB, cache=100 * MIB), jobs=unified(GIB, 400 * MIB, kills=2)))

    assert groups.room() == Room(GIB - 400 * MIB, GIB, 400 * MIB, "container")
    assert groups.used_bytes() == 200 * MIB
    assert (groups.num_kills(), groups.num_kills(around=True)) == (0, 2)


def test_kills_are_counted_in_version_1(tree):
    groups = tree(version_1(ours=legacy(GIB, 1, kills=3), jobs=legacy(GIB, 1, kills=1)))

    assert (groups.num_kills(), groups.num_kills(around=True)) == (3, 4)


def test_without_a_limit_the_machine_counts(tree):
    groups = tree({**version_1(ours=legacy(UNLIMITED, 100 * MIB)), "proc/meminfo": MEMINFO})

    assert groups.room() == Room(4 * GIB, 8 * GIB, 4 * GIB, "machine")


def test_a_hierarchy_without_the_memory_controller_has_nothing_to_say(tree):
    groups = tree({"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": MOUNT_2, "sys/fs/cgroup/cgroup.procs": "1"})

    assert (groups.room(), groups.used_bytes(), groups.num_kills()) == (None, None, None)


def test_figures_that_vanish_are_no_error(tree, tmp_path):
    groups = tree(version_1(ours=legacy(GIB, 1)))
    for path in Path(tmp_path, "sys/fs/cgroup/memory/jobs/ours").iterdir():
        path.unlink()

    assert (groups.room(), groups.used_bytes(), groups.num_kills(around=True)) == (None, None, None)
