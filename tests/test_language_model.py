"""examples/language_model: trains, resumes exactly, decodes as it was trained, says what is wrong."""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

for package in ("jax", "flax", "optax", "orbax.checkpoint", "tokenizers", "tqdm"):
    pytest.importorskip(package, reason=f"{package} is not installed: pip install '.[examples]'")

import generate
import jax
import jax.numpy as jnp
import lm_log
import measure_profile
import measure_quality
import measure_recall
import measure_speed
import train
from flax import nnx
from lm_config import PRESETS, ModelConfig, Preset, Recipe, UserError, variant
from lm_corpus import END, Corpus, prepare
from lm_decoding import Decoder, Words, capacity_for
from lm_decoding import generate as decode
from lm_mesh import make_mesh
from lm_model import Transformer, lookup, rebuild, wide_product
from lm_report import Budget
from lm_tasks import Task, copying, recall
from lm_training import cross_entropy, make_trainer

FOLDER = Path(__file__).parent.parent / "examples" / "language_model"
SMALL = ModelConfig(320, layers=2, width=32, heads=2, length=32, dtype="float32")
FLAGS = ["--batch", "2", "--length", "32", "--log-every", "1", "--corpus-mb", "1", "--data", "1"]


@pytest.fixture(autouse=True, scope="module")
def on_cpu() -> None:
    """Losses are compared to the last bit, and eight devices are needed: tests of the CPU path."""
    if jax.default_backend() != "cpu":
        pytest.skip("JAX has a GPU here; JAX_PLATFORMS=cpu runs these tests")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of text: this project's own, and files that are none."""
    folder = tmp_path_factory.mktemp("text")
    for path in sorted(FOLDER.parent.glob("*.py")):
        (folder / path.name).write_text(path.read_text())
    (folder / "picture.bin").write_bytes(bytes(range(256)) * 8)
    (folder / "empty.txt").write_text("")
    return folder


@pytest.fixture
def corpora(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One for all tests of a process, so that a vocabulary is learned once."""
    folder = tmp_path_factory.getbasetemp() / "corpora"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def command(text: Path, run: Path, *more: str) -> list[str]:
    return [sys.executable, str(FOLDER / "train.py"), "--text", str(text), "--run", str(run),
            *FLAGS, *more]  # fmt: skip


def run_to_end(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, check=False, capture_output=True, text=True, timeout=280)


def losses_of(run: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in lm_log.read(run / lm_log.LOG) if "loss" in r}


# --- training as a program


def test_a_killed_run_continues_to_the_same_losses(
    text: Path, corpora: Path, tmp_path: Path
) -> None:
    flags = ["--steps", "40", "--checkpoint-every", "5", "--validate-every", "20"]
    whole = run_to_end(command(text, tmp_path / "whole", *flags))
    assert whole.returncode == 0, whole.stderr
    assert (tmp_path / "whole" / "loss.png").read_bytes().startswith(b"\x89PNG")

    killed = tmp_path / "killed"
    process = subprocess.Popen(
        command(text, killed, *flags), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 150
    while process.poll() is None and not (killed / "checkpoints" / "10").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 10 <= len(losses_of(killed)) < 40, "it was killed on its way"
    again = run_to_end(command(text, killed, *flags))
    assert again.returncode == 0, again.stderr
    assert "goes on from the checkpoint of step" in again.stdout
    expected = losses_of(tmp_path / "whole")
    assert losses_of(killed) == expected and list(expected) == list(range(40))
    assert expected[39] < expected[0]
    last = f"loss: first {expected[0]:.4f}, last {expected[39]:.4f}"
    for done in (whole, again):
        assert done.stdout.splitlines()[-1] == last
    validations = [r["step"] for r in lm_log.read(killed / lm_log.LOG) if "validation" in r]
    assert validations == [19, 39]


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each kind of attention, of a model that is smaller than any preset."""
    runs = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "corpora"))
        patch.setitem(PRESETS, "tiny", Preset(SMALL, PRESETS["tiny"].recipe, 1))
        for kind in ("linear", "softmax"):
            runs[kind] = tmp_path_factory.mktemp(kind)
            flags = ["--text", str(text), "--run", str(runs[kind]), *FLAGS, "--steps", "4"]
            assert train.main([*flags, "--attention", kind]) == 0
    return runs


@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_generates_text(
    kind: str, trained: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--run", str(trained[kind]), "--prompt", "def ", "--tokens", "20"]
    assert generate.main(flags) == 0
    found = capsys.readouterr()
    assert found.out.startswith("def ") and len(found.out) > 10
    assert f"remembered by {kind} attention" in found.err


def test_generates_beyond_the_length_of_training(
    trained: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--prompt", "def ", "--tokens", "70"]
    assert generate.main(["--run", str(trained["linear"]), *flags, "--beyond"]) == 0
    for kind, more in (("linear", []), ("softmax", ["--beyond"])):
        assert generate.main(["--run", str(trained[kind]), *flags, *more]) == 2
        assert "the model is configured for 32" in capsys.readouterr().err


# --- what is said about bad input


def test_errors(
    monkeypatch: pytest.MonkeyPatch, text: Path, corpora: Path, trained: dict[str, Path], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setitem(PRESETS, "tiny", Preset(SMALL, PRESETS["tiny"].recipe, 1))
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "picture").write_bytes(b"\x89PNG\0\0")
    same = ["--text", str(text), "--run", str(trained["linear"]), *FLAGS, "--steps", "4"]
    elsewhere = ["--run", str(tmp_path / "run"), *FLAGS]
    cases = {
        "no text was found in": ["--text", str(empty), *elsewhere],
        "which is not a folder": ["--text", str(tmp_path / "none"), *elsewhere],
        "needs 200040 or more": [
            "--text", str(text), *elsewhere, "--length", "10000", "--steps", "1"],
        "has attention 'linear' where 'softmax' is asked for": [*same, "--attention", "softmax"],
        "has steps 4 where 5 is asked for": [*same, "--steps", "5"],
        "feature_map": ["--text", str(text), *elsewhere, "--feature-map", "cosine"],
        "steps is 0": ["--text", str(text), *elsewhere, "--steps", "0"],
        "a mesh of --data 3 --fsdp 5 --seq 1 has 15 devices": [
            "--text", str(text), *elsewhere, "--data", "3", "--fsdp", "5"],
        "a batch of 2 cannot be split": ["--text", str(text), *elsewhere, "--data", "8"],
        "needs all keys on each device": [
            "--text", str(text), *elsewhere, "--seq", "2", "--attention", "softmax"],
    }  # fmt: skip
    for expected, flags in cases.items():
        assert train.main(flags) == 2, expected
        told = capsys.readouterr().err
        assert expected in told and told.startswith("error: ") and told.count("\n") == 1, told
    for expected, flags in {
        "name a folder that train.py wrote": ["--run", str(tmp_path)],
        "the prompt is empty": ["--run", str(trained["linear"]), "--prompt", "", "--tokens", "9"],
        "--tokens is 0": ["--run", str(trained["linear"]), "--tokens", "0"],
    }.items():
        assert generate.main(flags) == 2
        assert expected in capsys.readouterr().err


def test_a_checkpoint_of_another_model(trained: dict[str, Path], tmp_path: Path) -> None:
    import shutil

    import lm_checkpoints

    copy = tmp_path / "copy"
    shutil.copytree(trained["linear"], copy)
    about = json.loads((copy / "run.json").read_text())
    about["model"]["layers"] = 3
    (copy / "run.json").write_text(json.dumps(about))
    with pytest.raises(UserError, match="has layers 2 where 3 is asked for"):
        lm_checkpoints.parameters_of(copy)


def test_a_sequence_longer_than_configured() -> None:
    tokens = jnp.zeros((1, 33), jnp.int32)
    with pytest.raises(UserError, match="a sequence has 33 tokens, but the model is configured"):
        jax.eval_shape(lambda: Transformer(SMALL, nnx.Rngs(0))(tokens))


# --- the model


@cache
def parameters_of(config: ModelConfig) -> Any:
    """As a model begins, in one program: an operation at a time takes ten times as long."""
    make = jax.jit(lambda: nnx.to_pure_dict(nnx.state(Transformer(config, nnx.Rngs(0)))))
    return make()


def windows(config: ModelConfig, batch: int) -> Any:
    rng = np.random.default_rng(0)
    return rng.integers(config.vocabulary, size=(batch, config.length + 1), dtype=np.int32)


def one_device() -> Any:
    return make_mesh(1, devices=jax.devices("cpu"))


def losses(config: ModelConfig, mesh: tuple[int, int, int], remat: str = "none") -> list[float]:
    """Of three steps on one batch."""
    trainer = make_trainer(
        config, Recipe(10, 8, 1e-2, warmup=1), make_mesh(*mesh, devices=jax.devices("cpu")), remat
    )
    x, tree, found = trainer.put(windows(config, 8)), trainer.initial(), []
    for _ in range(3):
        tree, loss = trainer.step(tree, *x)
        found.append(float(loss))
    if mesh[1] > 1:
        assert "fsdp" in tree["parameters"]["blocks"]["wide"]["kernel"].sharding.spec
    return found


@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_meshes_and_remat_change_nothing(kind: str) -> None:
    config = variant(SMALL, kind)
    expected = losses(config, (1, 1, 1))
    assert expected[-1] < expected[0] - 0.1
    mesh = (2, 2, 2) if kind == "linear" else (2, 4, 1)
    np.testing.assert_allclose(losses(config, mesh, "dots"), expected, rtol=1e-5)


def test_remat_of_dots_keeps_attention() -> None:
    def calls(remat: str) -> int:
        model = rebuild(lambda: Transformer(SMALL, nnx.Rngs(0), None, remat))
        parameters = parameters_of(SMALL)
        tokens = jnp.zeros((1, 8), jnp.int32)
        program = jax.make_jaxpr(jax.grad(lambda p: model(p)(tokens).sum()))(parameters)
        return str(program).count("la_cupy_forward[")

    assert (calls("none"), calls("dots"), calls("layers")) == (1, 1, 2)


@pytest.mark.parametrize("kind", ["linear", "linear:a=0,feature_map=exp,qk_norm=none", "softmax"])
def test_decoding_says_what_the_whole_model_says(kind: str) -> None:
    config = variant(SMALL, kind)
    parameters = parameters_of(config)
    prompt = [5, 9, 100, 7, 7]
    decoder = Decoder(config, parameters, capacity_for(len(prompt), 27))
    found = [token for some in decode(decoder, prompt, 27) for token in some]
    model = rebuild(lambda: Transformer(config, nnx.Rngs(0)))
    whole = jax.jit(lambda parameters, tokens: model(parameters)(tokens))
    logits = whole(parameters, jnp.asarray([prompt + found[:-1]]))[0, len(prompt) - 1 :]
    assert found == logits.argmax(-1).tolist() and len(set(found)) > 3


def test_state_does_not_grow_with_the_text() -> None:
    sizes = {Decoder(SMALL, parameters_of(SMALL), n).remembered(1) for n in (64, 4096)}
    assert sizes == {2 * 4 * 2 * (16 * 16 + 16 + 16 + 1)}  # layers, bytes, heads, a State


@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_nothing_is_scattered(kind: str) -> None:
    """A GPU adds what is scattered in another order each time, and a resumed run would differ."""
    trainer = make_trainer(variant(SMALL, kind), Recipe(1, 2, 1e-3), one_device(), "dots")
    batch = jax.ShapeDtypeStruct((2, SMALL.length), jnp.int32)
    program = trainer.step.lower(trainer.abstract, batch, batch).as_text()  # type: ignore[attr-defined]
    assert "dot_general" in program and "scatter" not in program


def test_own_gradients_are_right() -> None:
    """Of rows of a table, of logits, and of the loss, against JAX's."""
    rng = np.random.default_rng(0)
    table, matrix = rng.standard_normal((9, 4)), rng.standard_normal((4, 9))
    tokens, targets = rng.integers(9, size=(2, 3, 5))

    def ours(table: Any, matrix: Any) -> Any:
        logits = wide_product(lookup(table, tokens, "float32"), matrix)
        return cross_entropy(logits, targets)

    def plain(table: Any, matrix: Any) -> Any:
        logits = jax.nn.log_softmax(table[tokens] @ matrix)
        return -jnp.take_along_axis(logits, jnp.asarray(targets)[..., None], -1).mean()

    x = [jnp.asarray(y, jnp.float32) for y in (table, matrix)]
    for found, expected in zip(
        jax.tree.leaves(jax.value_and_grad(ours, (0, 1))(*x)),
        jax.tree.leaves(jax.value_and_grad(plain, (0, 1))(*x)),
        strict=True,
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_presets() -> None:
    sizes = {name: preset.model.parameters for name, preset in PRESETS.items()}
    assert 9e6 < sizes["10m"] < 11e6 and 1.35e9 < sizes["1.4b"] < 1.45e9
    large = PRESETS["1.4b"].model
    assert (large.layers, large.width, large.heads, large.head_width) == (24, 2048, 16, 128)
    parameters = nnx.state(nnx.eval_shape(lambda: Transformer(PRESETS["tiny"].model, nnx.Rngs(0))))
    count = sum(x.size for x in jax.tree.leaves(parameters))
    assert count == pytest.approx(sizes["tiny"], rel=1e-3)


# --- text and tokens


def test_corpus_and_back_to_text(text: Path, corpora: Path) -> None:
    corpus = prepare(text, 400, 1)
    assert prepare(text, 400, 1).folder == corpus.folder
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(corpus.tokenizer))
    everything = np.concatenate([corpus.train, corpus.validation])
    assert tokenizer.token_to_id(END) == 0
    files = {p.read_text() for p in text.glob("*.py")}
    ends = np.flatnonzero(everything == 0)
    first = Words(tokenizer).add(everything[: ends[0]].tolist())
    assert first in files and len(ends) == len(files)
    words, snowman = Words(tokenizer), tokenizer.encode("é☃ x").ids
    assert "".join(words.add([token]) for token in snowman) == "é☃ x"


def test_batches_depend_on_seed_and_step_alone() -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    corpus = Corpus(tokens[:900], tokens[900:], Path(), "")
    batch = corpus.batch(3, 5, 4, 16)
    assert batch.shape == (4, 17) and (np.diff(batch) == 1).all()
    assert (batch == corpus.batch(3, 5, 4, 16)).all()
    assert (batch != corpus.batch(3, 6, 4, 16)).any() and (batch != corpus.batch(4, 5, 4, 16)).any()
    held_out = list(corpus.held_out(3, 16, 2))
    assert len(held_out) == 2 and min(x.min() for x in held_out) >= 900


def test_log_forgets_what_is_repeated(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 0, "loss": 2.0}\n{"step": 1, "loss": 1.0}\n{"step": 2, "lo')
    with lm_log.Log(path, 1) as log:
        log.write({"step": 1, "loss": 1.5})
    assert lm_log.read(path) == [{"step": 0, "loss": 2.0}, {"step": 1, "loss": 1.5}]


# --- what measures it


def drawn(task: Task) -> list[Any]:
    return [np.asarray(x) for x in jax.jit(task.draw, static_argnums=1)(jax.random.key(0), 5)]


def test_tasks_ask_for_what_was_shown() -> None:
    task = recall(pairs=4, length=24, vocabulary=32)
    tokens, targets = drawn(task)
    assert tokens.shape == targets.shape == (5, task.length)
    for row, asked in zip(tokens, targets, strict=True):
        shown = dict(zip(row[:8:2], row[1:8:2], strict=True))
        places = np.flatnonzero(asked >= 0)
        assert len(shown) == 4 and places.tolist() == list(range(8, 24, 2))
        assert [shown[k] for k in row[places]] == asked[places].tolist()
    tokens, targets = drawn(copying(6))
    assert (targets[:, 6:] == tokens[:, :6]).all() and (targets[:, :6] == -1).all()
    assert (tokens[:, 6] == 0).all() and (tokens[:, 7:] == tokens[:, :5]).all()
    with pytest.raises(UserError, match="ask for fewer pairs"):
        recall(pairs=16, length=32, vocabulary=64)


def test_an_experiment_learns() -> None:
    config = dataclasses.replace(SMALL, vocabulary=64, length=12, layers=1)
    experiment = measure_recall.Experiment(
        variant(config, "softmax"), copying(6), batch=16, steps=100
    )
    accuracy, found = experiment.run(5e-3)
    assert len(found) == 10 and found[-1] < found[0] < 4.5
    assert 1 / 64 < accuracy <= 1


def test_profile_sorts_kernels() -> None:
    names = {
        "void la::sweep<la::SweepConfig<la::Wgmma, la::Out>>": "attention",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16": "attention",
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT": "products",
        "sm90_xmma_gemm_bf16bf16_bf16f32": "products",
        "loop_multiply_fusion": "rest",
        "input_reduce_fusion_3": "rest",
    }
    found = measure_profile.split([(name, 1e-3) for name in names] * 2, steps=2)
    assert found["ms"] == {"attention": 2.0, "products": 2.0, "rest": 2.0}
    assert {name: kind for name, kind, _ in found["kernels"]} == names


def test_speed_lines() -> None:
    row = {
        "length": 8,
        "batch": 2,
        "remat": "dots",
        "fault": None,
        "step_ms": 1.0,
        "mfu": 0.5,
        "peak_gib": 1.0,
    }
    rows = [
        {**row, "attention": "linear", "tokens_per_s": 30.0},
        {**row, "attention": "softmax", "tokens_per_s": 20.0},
        {**row, "length": 16, "attention": "softmax", "fault": "does not fit"},
    ]
    lines = measure_speed.lines(rows)
    assert [line[-1] for line in lines] == ["1.50", "1.00", ""]
    assert lines[2][4] == "does not fit"


def test_speed_makes_a_case_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def child(options: Any, kind: str, length: int, batch: int, remat: str, budget: Any) -> Any:
        tried.append((batch, remat))
        return {"fault": None if remat == "layers" else "does not fit"}

    monkeypatch.setattr(measure_speed, "_child", child)
    options = argparse.Namespace(tokens=64, remat="dots")
    row = measure_speed.case(options, "linear", 16, Budget(1000))
    assert tried == [(4, "dots"), (2, "dots"), (1, "dots"), (1, "layers")]
    assert row["fault"] is None and row["remat"] == "layers"


def test_flops() -> None:
    """As counted by XLA for the forward pass, times three."""
    for kind in ("softmax", "linear"):
        config = dataclasses.replace(variant(PRESETS["10m"].model, kind), dtype="float32", layers=1)
        expected = 6 * config.matrix_parameters
        extra = config.flops_per_token(512) - expected
        keys = 256 if kind == "softmax" else 64
        assert extra == 3 * 2 * 2 * 256 * keys  # two products of 256 columns with this many keys


def test_quality_at_equal_tokens(
    monkeypatch: pytest.MonkeyPatch, text: Path, corpora: Path, tmp_path: Path
) -> None:
    monkeypatch.setitem(PRESETS, "tiny", Preset(SMALL, PRESETS["tiny"].recipe, 1))
    flags = ["--preset", "tiny", "--text", str(text), "--corpus-mb", "1", "--steps", "4"]
    flags += ["--batch", "2", "--length", "32", "--validations", "2", "--out", str(tmp_path)]
    assert measure_quality.main(flags) == 0
    report = json.loads((tmp_path / "quality.json").read_text())
    assert [row["variant"] for row in report["rows"]] == list(measure_quality.VARIANTS)
    assert len({row["tokens_m"] for row in report["rows"]}) == 1
    assert all(np.isfinite(row["validation"]) for row in report["rows"])
