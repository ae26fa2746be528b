"""Text files to tokens: a byte-pair vocabulary trained on them, and one memory-mapped array.

Without a folder the text is Python's: the standard library and the packages of this machine, so
that nothing is downloaded. What is prepared once is found again, under a name made of what went in.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from lm_config import UserError

END = "<|end|>"
"""The token between files; its number is 0."""
VALIDATION = 0.05
"""The part of the tokens, at the end, on which nothing is trained."""
LEARN_FROM = 2**25
"""Bytes of text from which the vocabulary is learned; more do not make it better."""
FORMAT = 1  # to be raised when the same files would give other tokens


@dataclass(frozen=True)
class Corpus:
    """Tokens for training and validation, and where the tokenizer lies."""

    train: np.ndarray[Any, Any]
    validation: np.ndarray[Any, Any]
    folder: Path
    name: str

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer.json"

    def batch(self, seed: int, step: int, batch: int, length: int) -> np.ndarray[Any, Any]:
        """Windows (batch, length + 1), at places that depend on seed and step and nothing else.

        So a run that is resumed sees what it would have seen, on any number of devices.
        """
        places = np.random.default_rng([seed, step]).integers(len(self.train) - length, size=batch)
        return _windows(self.train, places, length)

    def held_out(self, batch: int, length: int, batches: int) -> Iterator[np.ndarray[Any, Any]]:
        """Windows spread over the validation tokens: always the same."""
        last = len(self.validation) - length - 1
        places = np.linspace(0, last, batch * batches, dtype=np.int64).reshape(batches, batch)
        for some in places:
            yield _windows(self.validation, some, length)

    def check(self, length: int) -> None:
        """Both parts must have a window of this length."""
        if len(self.validation) <= length + 1:
            raise UserError(
                f"the text has {len(self.train) + len(self.validation)} tokens, but a length of "
                f"{length} needs {round((length + 2) / VALIDATION)} or more, a twentieth of which "
                f"is for validation: give more text, or a smaller --length"
            )


def _windows(
    tokens: np.ndarray[Any, Any], places: np.ndarray[Any, Any], length: int
) -> np.ndarray[Any, Any]:
    return np.stack([tokens[i : i + length + 1] for i in places]).astype(np.int32)


def prepare(
    folder: Path | None, vocabulary: int, limit_mb: int, cache: Path | None = None
) -> Corpus:
    """The corpus of a folder (None: Python's sources), made now or found from before."""
    if vocabulary < 257:
        raise UserError(
            f"vocabulary is {vocabulary}, but must be 257 or more: each byte is a token, and "
            f"{END} is one"
        )
    files = chosen_files(folder, limit_mb * 10**6)
    name = _name(files, vocabulary)
    home = (cache or default_cache()) / name
    if not (home / "corpus.json").exists():
        _make(files, vocabulary, home)
    about = json.loads((home / "corpus.json").read_text())
    tokens = np.memmap(home / "tokens.bin", about["dtype"], mode="r")
    split = round(len(tokens) * (1 - VALIDATION))
    return Corpus(tokens[:split], tokens[split:], home, name)


def default_cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "la_cupy" / "corpus"


# --- which files -------------------------------------------------------------------------------


def chosen_files(folder: Path | None, limit: int) -> list[Path]:
    """Up to `limit` bytes of files, in an order that mixes folders and is always the same."""
    if folder is not None and not folder.is_dir():
        raise UserError(f"--text is {folder}, which is not a folder: name a folder of text files")
    roots = [folder] if folder else python_folders()
    found = {_order(root, path): path for root in roots for path in _files(root, folder is None)}
    chosen, total = [], 0
    for _, path in sorted(found.items()):
        if total >= limit:
            break
        chosen.append(path)
        total += path.stat().st_size
    if not chosen:
        where = folder or "the folders of Python's own sources"
        raise UserError(f"no text was found in {where}: give --text a folder of UTF-8 files")
    return chosen


def python_folders() -> list[Path]:
    """The standard library, and wherever packages are imported from."""
    packages = [Path(p) for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
    return [Path(sysconfig.get_paths()["stdlib"]), *packages]


def _files(root: Path, python: bool) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        hidden = {name for name in folders if name.startswith(".") or name == "__pycache__"}
        # packages inside the standard library's folder are a root of their own
        apart = {"site-packages", "dist-packages"} if python else set()
        folders[:] = sorted(set(folders) - hidden - apart)
        for name in names:
            path = Path(folder, name)
            named = not name.startswith(".") and (not python or path.suffix == ".py")
            if named and path.is_file() and path.stat().st_size and _is_text(path):
                yield path


def _is_text(path: Path) -> bool:
    """By its first bytes; what is wrong further on is replaced when it is read."""
    with path.open("rb") as file:
        start = file.read(1024)
    try:
        start.decode()
    except UnicodeDecodeError as error:
        return error.start >= len(start) - 3 and b"\0" not in start  # a character cut in two
    return b"\0" not in start


def _order(root: Path, path: Path) -> str:
    return hashlib.sha256(str(path.relative_to(root)).encode()).hexdigest() + str(path)


def _name(files: list[Path], vocabulary: int) -> str:
    """Of the corpus: the files, their sizes and dates, and how they become tokens."""
    text = [f"{FORMAT} {vocabulary}"]
    text += [f"{path} {(s := path.stat()).st_size} {s.st_mtime_ns}" for path in files]
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]


# --- to tokens ---------------------------------------------------------------------------------


def _texts(files: Iterable[Path]) -> Iterator[str]:
    for path in files:
        yield path.read_text(encoding="utf-8", errors="replace")


def _make(files: list[Path], vocabulary: int, home: Path) -> None:
    """Writes everything beside its place and moves it there whole."""
    home.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=home.parent, prefix="unfinished-"))
    try:
        tokenizer = _learn(files, vocabulary)
        tokenizer.save(str(scratch / "tokenizer.json"))
        dtype = "uint16" if vocabulary <= 2**16 else "uint32"
        count = _encode(tokenizer, files, scratch / "tokens.bin", dtype)
        about = {"dtype": dtype, "tokens": count, "files": len(files), "vocabulary": vocabulary}
        (scratch / "corpus.json").write_text(json.dumps(about))
        try:
            scratch.rename(home)
        except OSError:  # another process was first, and has the same
            if not (home / "corpus.json").exists():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _learn(files: list[Path], vocabulary: int) -> Any:
    """A byte-pair tokenizer of this size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    sample, total = [], 0
    for path in files:
        if total < LEARN_FROM:
            sample.append(path)
            total += path.stat().st_size
    tokenizer.train_from_iterator(_texts(sample), trainer)
    return tokenizer


def _encode(tokenizer: Any, files: list[Path], to: Path, dtype: str) -> int:
    """All files to one array on disk, many at a time on all cores; how many tokens."""
    from tqdm import tqdm

    count, at_once = 0, 256
    bar = tqdm(total=len(files), desc="text to tokens", disable=not sys.stderr.isatty())
    with to.open("wb") as out, bar:
        for i in range(0, len(files), at_once):
            some = files[i : i + at_once]
            for encoding in tokenizer.encode_batch(list(_texts(some)), add_special_tokens=False):
                ids = np.array([*encoding.ids, 0], dtype)
                out.write(ids.tobytes())
                count += len(ids)
            bar.update(len(some))
    return count
