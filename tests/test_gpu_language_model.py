"""The language model on a GPU: both kinds of attention train, resume exactly and decode there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

for package in ("jax", "flax", "optax", "orbax.checkpoint", "tokenizers", "tqdm"):
    pytest.importorskip(package, reason=f"{package} is not installed: pip install '.[examples]'")

import lm_log

FOLDER = Path(__file__).parent.parent / "examples" / "language_model"


def run(program: str, *flags: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / program), *flags]
    return subprocess.run(
        command, cwd=cwd, check=False, capture_output=True, text=True, timeout=280
    )


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_trains_resumes_and_decodes(kind: str, tmp_path: Path) -> None:
    flags = ["--preset", "tiny", "--attention", kind, "--corpus-mb", "4", "--batch", "16",
             "--steps", "60", "--log-every", "1", "--checkpoint-every", "30", "--data", "1"]  # fmt: skip
    whole = run("train.py", *flags, "--run", "whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    expected = [r["loss"] for r in lm_log.read(tmp_path / "whole" / lm_log.LOG) if "loss" in r]
    assert len(expected) == 60 and expected[-1] < expected[0] - 1

    # as if it had been killed after its checkpoint of step 30
    (tmp_path / "whole").rename(tmp_path / "cut")
    subprocess.run(["rm", "-r", "cut/checkpoints/60"], cwd=tmp_path, check=True)
    again = run("train.py", *flags, "--run", "cut", cwd=tmp_path)
    assert "goes on from the checkpoint of step 30" in again.stdout, again.stderr
    found = [r["loss"] for r in lm_log.read(tmp_path / "cut" / lm_log.LOG) if "loss" in r]
    assert found == expected

    text = run("generate.py", "--run", "cut", "--prompt", "def ", "--tokens", "80", cwd=tmp_path)
    assert text.returncode == 0 and text.stdout.startswith("def "), text.stderr


@pytest.mark.gpu
def test_decoding_is_right_and_has_a_speed(tmp_path: Path) -> None:
    flags = ["--preset", "tiny", "--contexts", "64", "--batches", "1"]
    done = run("measure_decoding.py", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| linear | 1 | any |" in done.stdout and "| softmax | 1 | 64 |" in done.stdout
