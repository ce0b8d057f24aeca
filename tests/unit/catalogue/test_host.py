import os

import pytest

from memfit.catalogue import host
from memfit.catalogue.host import cgroup_limit_bytes, host_memory_bytes, physical_memory_bytes, resident_bytes
from memfit.core.units import GIB, MIB

UNLIMITED = 9223372036854771712  # what version 1 writes for "no limit" with pages of 4096 bytes


def v1_mount(root="/", point="/sys/fs/cgroup/memory"):
    return f"35 31 0:32 {root} {point} rw,relatime shared:9 - cgroup cgroup rw,memory\n"


def v2_mount(root="/", point="/sys/fs/cgroup"):
    return f"41 31 0:38 {root} {point} rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n"


OTHER_MOUNTS = (
    "23 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"
    "a broken line\n"
    "40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n"
)


@pytest.fixture
def tree(tmp_path):
    """Builds a file system of the given files and returns where it starts."""

    def build(*, cgroup, mountinfo, files=()):
        contents = {"proc/self/cgroup": cgroup, "proc/self/mountinfo": mountinfo, **dict(files)}
        for name, text in contents.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(text))
        return tmp_path

    return build


def v1_stat(limit):
    return f"cache 4096\nrss 8192\nhierarchical_memory_limit {limit}\nhierarchical_memsw_limit {UNLIMITED}\n"


class TestVersion1:
    CGROUP = "9:name=systemd:/\n4:memory:/jobs/ours\n1:cpu,cpuacct:/\n0::/\n"

    def test_the_limit_of_the_whole_hierarchy_counts(self, tree):
        # GIVEN a group without a limit of its own below one with 2 GiB
        root = tree(
            cgroup=self.CGROUP,
            mountinfo=OTHER_MOUNTS + v1_mount(),
            files={
                "sys/fs/cgroup/memory/jobs/ours/memory.stat": v1_stat(2 * GIB),
                "sys/fs/cgroup/memory/jobs/ours/memory.limit_in_bytes": UNLIMITED,
                "sys/fs/cgroup/memory/memory.stat": v1_stat(UNLIMITED),
            },
        )
        assert cgroup_limit_bytes(root) == 2 * GIB

    def test_no_limit(self, tree):
        files = {"sys/fs/cgroup/memory/jobs/ours/memory.stat": v1_stat(UNLIMITED)}
        assert cgroup_limit_bytes(tree(cgroup=self.CGROUP, mountinfo=v1_mount(), files=files)) is None

    def test_a_container_that_mounts_only_its_own_group(self, tree):
        # GIVEN a mount that shows the hierarchy from our group on
        files = {"sys/fs/cgroup/memory/memory.stat": v1_stat(600 * MIB)}
        root = tree(cgroup=self.CGROUP, mountinfo=v1_mount(root="/jobs/ours"), files=files)
        assert cgroup_limit_bytes(root) == 600 * MIB

    def test_a_path_that_is_not_mounted_falls_back_to_the_nearest_level(self, tree):
        files = {"sys/fs/cgroup/memory/memory.stat": v1_stat(600 * MIB)}
        assert cgroup_limit_bytes(tree(cgroup=self.CGROUP, mountinfo=v1_mount(), files=files)) == 600 * MIB

    def test_a_mount_point_with_a_space(self, tree):
        files = {"mnt/control groups/jobs/ours/memory.stat": v1_stat(GIB)}
        root = tree(cgroup=self.CGROUP, mountinfo=v1_mount(point="/mnt/control\\040groups"), files=files)
        assert cgroup_limit_bytes(root) == GIB


class TestVersion2:
    CGROUP = "0::/user.slice/job.scope/worker\n"
    GROUP = "sys/fs/cgroup/user.slice/job.scope/worker"

    def limits(self, worker, job, user):
        return {
            f"{self.GROUP}/memory.max": f"{worker}\n",
            "sys/fs/cgroup/user.slice/job.scope/memory.max": f"{job}\n",
            "sys/fs/cgroup/user.slice/memory.max": f"{user}\n",
        }

    @pytest.mark.parametrize(
        ("worker", "job", "user", "expected"),
        [
            (GIB, "max", "max", GIB),
            ("max", 2 * GIB, 8 * GIB, 2 * GIB),
            (4 * GIB, 8 * GIB, 3 * GIB, 3 * GIB),
            ("max", "max", "max", None),
            ("", "garbage", "-1", None),
            (0, "max", "max", 0),
        ],
    )
    def test_the_least_of_all_levels_counts(self, tree, worker, job, user, expected):
        root = tree(cgroup=self.CGROUP, mountinfo=v2_mount(), files=self.limits(worker, job, user))
        assert cgroup_limit_bytes(root) == expected

    def test_a_namespace_whose_root_is_our_group(self, tree):
        root = tree(cgroup="0::/\n", mountinfo=v2_mount(), files={"sys/fs/cgroup/memory.max": GIB})
        assert cgroup_limit_bytes(root) == GIB

    @pytest.mark.parametrize("path", ["/../sibling", "/elsewhere/group"])
    def test_a_namespace_that_hides_our_path(self, tree, path):
        # GIVEN a mount of one part of the hierarchy and a path outside of it
        mount_root = "/" if path.startswith("/..") else "/pod/container"
        files = {"sys/fs/cgroup/memory.max": GIB}
        assert cgroup_limit_bytes(tree(cgroup=f"0::{path}\n", mountinfo=v2_mount(mount_root), files=files)) == GIB

    def test_a_group_that_was_deleted(self, tree):
        files = {"sys/fs/cgroup/old/memory.max": GIB}
        assert cgroup_limit_bytes(tree(cgroup="0::/old (deleted)\n", mountinfo=v2_mount(), files=files)) == GIB


def test_both_versions_at_once(tree):
    # GIVEN version 1 with the memory controller and a version 2 hierarchy without it
    root = tree(
        cgroup="4:memory:/job\n0::/job\n",
        mountinfo=v1_mount() + v2_mount(point="/sys/fs/cgroup/unified"),
        files={"sys/fs/cgroup/memory/job/memory.stat": v1_stat(GIB), "sys/fs/cgroup/unified/job/cgroup.procs": "1"},
    )
    assert cgroup_limit_bytes(root) == GIB


@pytest.mark.parametrize("cgroup", ["", "nonsense", "4:cpu:/\n", ":::\n"])
def test_without_a_memory_group_there_is_no_limit(tree, cgroup):
    assert cgroup_limit_bytes(tree(cgroup=cgroup, mountinfo=v1_mount() + v2_mount())) is None


def test_a_system_without_proc_has_no_limit(tmp_path):
    assert cgroup_limit_bytes(tmp_path) is None


class TestThisMachine:
    def test_the_limit_is_never_above_the_physical_memory(self):
        assert 0 < host_memory_bytes() <= physical_memory_bytes()

    @pytest.mark.parametrize(
        ("limit", "physical", "expected"), [(GIB, 4 * GIB, GIB), (None, GIB, GIB), (4 * GIB, GIB, GIB), (None,) * 3]
    )
    def test_the_lesser_counts(self, monkeypatch, limit, physical, expected):
        monkeypatch.setattr(host, "cgroup_limit_bytes", lambda: limit)
        monkeypatch.setattr(host, "physical_memory_bytes", lambda: physical)
        assert host_memory_bytes() == expected

    def test_a_system_that_cannot_tell(self, monkeypatch):
        def refuse():
            raise OSError("no /proc")

        monkeypatch.setattr("psutil.virtual_memory", refuse)
        assert physical_memory_bytes() is None


def test_the_memory_of_this_process_grows_with_what_it_holds():
    before = resident_bytes()
    held = bytearray(os.urandom(64 * MIB))
    assert resident_bytes() - before > len(held) // 2
