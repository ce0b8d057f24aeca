import pytest

from memfit.processes.kernel_log import KernelLog, LoggedKill, parse

GROUP = (
    "3,1,2,-;Memory cgroup out of memory: Killed process 27367 (my (odd) name) total-vm:615924kB, anon-rss:14772kB, "
    "file-rss:4688kB, shmem-rss:374144kB, UID:0 pgtables:836kB oom_score_adj:0"
)


def test_a_kill_in_a_container():
    assert parse(GROUP) == LoggedKill(27367, "my (odd) name", (14772 + 374144) * 1024)


def test_a_kill_of_the_whole_machine():
    line = "Out of memory: Killed process 9 (python3) total-vm:1kB, anon-rss:2kB, file-rss:0kB"

    assert parse(line) == LoggedKill(9, "python3", 2048)


@pytest.mark.parametrize(
    "line", ["", "python[1]: segfault at 0", "oom-kill:constraint=CONSTRAINT_MEMCG,task=python,pid=3,uid=0"]
)
def test_other_lines_tell_nothing(line):
    assert parse(line) is None


def test_only_what_is_new_is_read(tmp_path):
    path = tmp_path / "log"
    path.write_text(GROUP.replace("27367", "1") + "\n")
    log = KernelLog(path)
    assert log.kills() == []

    with path.open("a") as file:
        file.write(f"something else\n{GROUP}\n")

    assert [kill.pid for kill in log.kills()] == [27367]
    assert log.kills() == []
    log.close()
    log.close()
    assert not log.is_readable


def test_no_log_has_no_kills(tmp_path):
    log = KernelLog(tmp_path / "missing")

    assert not log.is_readable
    assert log.kills() == []
