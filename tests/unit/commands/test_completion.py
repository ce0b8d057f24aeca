import shutil
import subprocess

import pytest

from memfit import commands


def script(shell, capsys):
    assert commands.main(["completion", shell]) == 0
    return capsys.readouterr().out


def completed_by_bash(text, *words):
    """What bash would offer for the last of the words."""
    quoted = " ".join(f"'{word}'" for word in words)
    ask = f'COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _memfit; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", f"{text}\n{ask}"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_options_and_devices(capsys):
    text = script("bash", capsys)

    for words, offered in {
        ("memfit", "es"): ["estimate"],
        ("memfit", "estimate", "--seq"): ["--sequence-length"],
        ("memfit", "estimate", "-d", "titan"): ["titan-rtx"],
        ("memfit", "estimate", "--device", "=", "titan"): ["titan-rtx"],
        ("memfit", "estimate", "-d", "t4,titan"): ["t4,titan-rtx"],
        ("memfit", "plan", "--precision", "amp"): ["amp-fp16", "amp-bf16"],
        ("memfit", "data", ""): ["inspect", "convert", "bench"],
        ("memfit", "data", "bench", "--sec"): ["--seconds"],
        ("memfit", "devices", "titan"): ["titan-rtx"],
        ("memfit", "estimate", ""): [],
        ("memfit", "dryrun", "train.py", "--d"): [],
    }.items():
        assert completed_by_bash(text, *words) == offered, words


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
def test_fish_completes(capsys, tmp_path):
    (tmp_path / "memfit.fish").write_text(script("fish", capsys))
    ask = f"source {tmp_path}/memfit.fish; complete -C 'memfit es'; complete -C 'memfit estimate -d titan'"
    done = subprocess.run(
        ["fish", "-c", ask], capture_output=True, text=True, timeout=60, env={"HOME": str(tmp_path), "PATH": "/usr/bin"}
    )

    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["estimate", "titan-rtx"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
def test_zsh_takes_the_script(capsys):
    done = subprocess.run(["zsh", "-f", "-n"], input=script("zsh", capsys), capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stderr) == (0, "")


def test_every_command_and_option_is_in_each_script(capsys):
    for shell in ("bash", "zsh", "fish"):
        text = script(shell, capsys)
        for word in ("max-batch", "completion", "keep-checkpoints", "allow-overflow", "a100-40gb"):
            assert word in text, (shell, word)


def test_another_shell_is_refused(capsys):
    with pytest.raises(SystemExit) as left:
        commands.main(["completion", "csh"])

    assert left.value.code == 2
    assert "there is no 'csh'. Did you mean 'zsh'?" in capsys.readouterr().err
